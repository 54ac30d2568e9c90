from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import POLICY, Net, batches, net

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.integrations.fsdp import fully_shard
from amptune.runtime.tuned import Tuned

FP16 = replace(POLICY, autocast="fp16")
RULES = replace(POLICY, fp32_modules=(Fp32Rule(path="body.0"), *POLICY.fp32_modules))
O2 = Policy(weights="half", master_weights=True, fp32_modules=POLICY.fp32_modules)
RECOMPUTED = replace(POLICY, checkpoint=("body", "head"))
CHANNELS_LAST = Policy(memory_format="channels_last")

Tensors = dict[str, torch.Tensor]


def gradients(tuned: Tuned, model: Net, forward: Any, batch: Any) -> Tensors:
    """What a backward pass leaves behind, the loss scale taken out by the scaler itself; whole, if sharded."""
    model.zero_grad()
    with tuned.autocast():
        loss = nn.functional.cross_entropy(forward(batch[0]), batch[1])
    tuned.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    tuned.scaler.unscale_(torch.optim.SGD(model.parameters()))
    tuned.scaler.update()
    return {name: _whole(parameter.grad).cpu() for name, parameter in model.named_parameters()}


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What rank 0 saw of one way to train in two processes."""

    gradients: Tensors
    expected: Tensors
    weight_dtypes: dict[str, torch.dtype]
    gathered_apart: set[str]
    state_keys: list[str]
    undo_says: str


def _work(rank: int, folder: str, backend: str) -> None:
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        mine = tuple(tensor.to(device) for tensor in batches(2)[rank])
        seen = {
            "ddp": _ddp(POLICY, mine, device),
            "ddp, fp16": _ddp(FP16, mine, device),
            "ddp, O2": _ddp(O2, mine, device),
            "ddp, checkpoint": _ddp(RECOMPUTED, mine, device),
            "fsdp2": _fsdp2(POLICY, mine, device),
            "fsdp2, fp16": _fsdp2(FP16, mine, device),
            "fsdp2, rules": _fsdp2(RULES, mine, device),
            "fsdp2, off": _fsdp2(Policy(), mine, device),
            "fsdp2, checkpoint": _fsdp2(RECOMPUTED, mine, device),
        }
        torch.save(_trained_with_o2(mine, device), f"{folder}/trained{rank}.pt")
        if rank == 0:
            torch.save(seen, f"{folder}/seen.pt")
    finally:
        dist.destroy_process_group()


def _ddp(policy: Policy, batch: Any, device: torch.device) -> Seen:
    model = net().to(device)
    tuned = apply(policy, model)
    return _seen(tuned, model, DistributedDataParallel(tuned.model), batch, _in_one_process(policy, device))


def _trained_with_o2(batch: Any, device: torch.device) -> tuple[list[float], Tensors]:
    """The losses, and what a checkpoint holds: of training that reduces gradients every second micro-batch."""
    model = net().to(device)
    tuned = apply(O2, model)
    parallel: Any = DistributedDataParallel(tuned.model)
    optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for i in range(20):
        with nullcontext() if i % 2 else parallel.no_sync():
            loss = nn.functional.cross_entropy(parallel(batch[0]), batch[1])
            tuned.scaler.scale(loss / 2).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if i % 2:
            tuned.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _fsdp2(policy: Policy, batch: Any, device: torch.device) -> Seen:
    model = net().to(device)
    tuned = apply(policy, model)
    mesh = init_device_mesh(device.type, (2,))
    fully_shard(model.body, tuned, mesh=mesh)
    fully_shard(model, tuned, mesh=mesh)
    return _seen(tuned, model, model, batch, _in_one_process(policy, device))


def _in_one_process(policy: Policy, device: torch.device) -> Tensors:
    """The mean over what the two processes are given, one after the other."""
    both = []
    for batch in batches(2):
        model = net().to(device)
        with apply(policy, model) as tuned:
            both.append(gradients(tuned, model, model, [tensor.to(device) for tensor in batch]))
    return {name: (both[0][name] + both[1][name]) / 2 for name in both[0]}


def _seen(tuned: Tuned, model: Net, parallel: nn.Module, batch: Any, expected: Tensors) -> Seen:
    dtypes: dict[str, torch.dtype] = {}
    for name in ("body.0", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, _, __, name=name: dtypes.update({name: module.weight.dtype})
        )
    found = gradients(tuned, model, parallel, batch)
    apart = {name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")}
    keys = list(model.state_dict())
    says = ""
    try:
        tuned.undo()
    except PolicyApplyError as error:
        says = str(error)
    return Seen(
        gradients=found,
        expected=expected,
        weight_dtypes=dtypes,
        gathered_apart=apart,
        state_keys=keys,
        undo_says=says,
    )


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, two_gpus])])
def all_seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("two_processes")
    mp.spawn(_work, args=(str(folder), request.param), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    found: dict[str, Any] = torch.load(folder / "seen.pt", weights_only=False)
    found["trained"] = [torch.load(folder / f"trained{rank}.pt") for rank in range(2)]
    return found


@pytest.fixture(scope="module")
def seen(all_seen: dict[str, Any]) -> dict[str, Seen]:
    return {way: seen for way, seen in all_seen.items() if isinstance(seen, Seen)}


WAYS = [
    "ddp",
    "ddp, fp16",
    "fsdp2",
    "fsdp2, fp16",
    "fsdp2, rules",
    "fsdp2, off",
    "ddp, checkpoint",
    "fsdp2, checkpoint",
]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(seen: dict[str, Seen], way: str) -> None:
    assert seen[way].gradients.keys() == seen[way].expected.keys()
    for name, gradient in seen[way].expected.items():
        torch.testing.assert_close(seen[way].gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_ddp_reduces_the_gradients_of_half_weights_in_half(seen: dict[str, Seen]) -> None:
    found = seen["ddp, O2"]
    assert found.weight_dtypes == {"body.0": torch.float16, "head": torch.float32}
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    for name, gradient in found.expected.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=2e-3, atol=1e-5, msg=name)


def test_half_weights_train_under_ddp_and_stay_the_same_in_both_processes(all_seen: dict[str, Any]) -> None:
    (losses, one), (_, other) = all_seen["trained"]
    assert losses[-1] < 0.9 * losses[0]
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_half_weights_are_not_for_fsdp2() -> None:
    with apply(O2, net()) as tuned, pytest.raises(PolicyApplyError, match="holds whole weights in half") as caught:
        fully_shard(tuned.model, tuned)
    assert "param_dtype=torch.float16" in str(caught.value)


def test_fsdp2_gathers_excluded_modules_in_fp32_and_the_rest_in_half(seen: dict[str, Seen]) -> None:
    assert seen["fsdp2"].weight_dtypes == {"body.0": torch.bfloat16, "head": torch.float32}
    assert seen["fsdp2, fp16"].weight_dtypes == {"body.0": torch.float16, "head": torch.float32}
    assert seen["fsdp2, rules"].weight_dtypes == {"body.0": torch.float32, "head": torch.float32}
    assert seen["fsdp2, off"].weight_dtypes == {"body.0": torch.float32, "head": torch.float32}


def test_fsdp2_makes_units_of_excluded_modules(seen: dict[str, Seen]) -> None:
    assert seen["fsdp2"].gathered_apart == {"", "body", "head"}
    assert seen["fsdp2, rules"].gathered_apart == {"", "body", "body.0", "head"}
    assert seen["fsdp2, off"].gathered_apart == {"", "body"}


def test_no_weight_is_renamed(seen: dict[str, Seen]) -> None:
    assert {tuple(way.state_keys) for way in seen.values()} == {tuple(net().state_dict())}


def test_under_ddp_a_policy_can_be_undone_and_under_fsdp2_undo_says_why_not(seen: dict[str, Seen]) -> None:
    assert seen["ddp"].undo_says == ""
    assert "the class of head was changed again after the policy was applied" in seen["fsdp2"].undo_says


def test_the_policy_decides_the_dtypes_of_fsdp2() -> None:
    with apply(POLICY, net()) as tuned, pytest.raises(PolicyApplyError, match="leave mp_policy out"):
        fully_shard(tuned.model, tuned, mp_policy=None)


class FSDPModule:
    """What stands in for FSDP2's own, which takes processes to make."""


class FSDPLinear(FSDPModule, nn.Linear):
    """As fully_shard makes them."""


@pytest.mark.parametrize(
    "policy",
    [Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="0"),)), CHANNELS_LAST, Policy(checkpoint=("0",))],
    ids=str,
)
def test_a_model_that_was_sharded_already_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyApplyError, match="1 is sharded by fully_shard already: apply the policy before that"):
        apply(policy, nn.Sequential(nn.Linear(4, 4), FSDPLinear(4, 4)))


def test_a_policy_that_changes_no_module_can_come_after_sharding() -> None:
    apply(Policy(autocast="bf16"), nn.Sequential(FSDPLinear(4, 4))).undo()


def test_weights_that_are_not_contiguous_cannot_be_sharded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with (
        apply(CHANNELS_LAST, model) as tuned,
        pytest.raises(PolicyApplyError, match=r"shards contiguous weights alone, and 0\.weight is not"),
    ):
        fully_shard(model, tuned)


def test_weights_tied_across_precisions_cannot_be_sharded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    policy = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),))
    with (
        apply(policy, model) as tuned,
        pytest.raises(PolicyApplyError, match="Linear is kept in FP32 and shares weights with 0, which"),
    ):
        fully_shard(model, tuned)


def test_a_compiled_model_is_sharded_before_it_is_compiled() -> None:
    model: Any = torch.compile(net(), backend="eager")
    with apply(Policy(), net()) as tuned, pytest.raises(PolicyApplyError, match=r"before torch\.compile"):
        fully_shard(model, tuned)
