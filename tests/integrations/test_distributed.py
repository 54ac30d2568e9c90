from __future__ import annotations

from collections.abc import Sequence
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
    tuned.scaler.scale(loss).backward()
    tuned.scaler.unscale_(torch.optim.SGD(model.parameters()))
    tuned.scaler.update()
    return {name: _whole(parameter.grad).cpu() for name, parameter in model.named_parameters()}


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class Seen:
    """What rank 0 saw of one way to train in two processes."""

    gradients: Tensors
    expected: Tensors
    weight_dtypes: dict[str, torch.dtype]
    gathered_apart: set[str]
    state_keys: list[str]
    undo_says: str


WAYS = {
    "ddp": POLICY, "ddp, fp16": FP16, "ddp, O2": O2, "ddp, checkpoint": RECOMPUTED,
    "fsdp2": POLICY, "fsdp2, fp16": FP16, "fsdp2, rules": RULES, "fsdp2, checkpoint": RECOMPUTED,
    "fsdp2, off": Policy(),
}  # fmt: skip


def _work(rank: int, folder: str, backend: str) -> None:
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        both = [tuple(tensor.to(device) for tensor in batch) for batch in batches(2)]
        seen = {way: _seen(way.partition(",")[0], policy, both, rank, device) for way, policy in WAYS.items()}
        torch.save(_trained_with_o2(both[rank], device), f"{folder}/trained{rank}.pt")
        if rank == 0:
            torch.save(seen, f"{folder}/seen.pt")
    finally:
        dist.destroy_process_group()


def _seen(way: str, policy: Policy, both: Sequence[Any], rank: int, device: torch.device) -> Seen:
    alone = []
    for batch in both:  # what one process does, given both batches one after the other
        model = net().to(device)
        with apply(policy, model) as tuned:
            alone.append(gradients(tuned, model, model, batch))
    model = net().to(device)
    tuned = apply(policy, model)
    parallel: Any = model
    if way == "ddp":
        parallel = DistributedDataParallel(tuned.model)
    else:
        mesh = init_device_mesh(device.type, (2,))
        fully_shard(model.body, tuned, mesh=mesh)
        fully_shard(model, tuned, mesh=mesh)
    dtypes: dict[str, torch.dtype] = {}
    for name in ("body.0", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, _, __, name=name: dtypes.update({name: module.weight.dtype})
        )
    found, says = gradients(tuned, model, parallel, both[rank]), ""
    apart = {name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")}
    keys = list(model.state_dict())
    try:
        tuned.undo()
    except PolicyApplyError as error:
        says = str(error)
    expected = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    return Seen(found, expected, dtypes, apart, keys, says)


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
            tuned.scaler.scale(loss / 2).backward()
        losses.append(loss.item())
        if i % 2:
            tuned.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


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
    return {way: all_seen[way] for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(seen: dict[str, Seen], way: str) -> None:
    """Those of half weights are reduced in half."""
    rtol, atol = (2e-3, 1e-5) if way == "ddp, O2" else (1e-5, 1e-7)
    assert seen[way].gradients.keys() == seen[way].expected.keys()
    for name, gradient in seen[way].expected.items():
        torch.testing.assert_close(seen[way].gradients[name], gradient, rtol=rtol, atol=atol, msg=name)


def test_half_weights_train_under_ddp_and_stay_the_same_in_both_processes(all_seen: dict[str, Any]) -> None:
    (losses, one), (_, other) = all_seen["trained"]
    assert losses[-1] < 0.9 * losses[0]
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("way", "body", "apart"),
    [
        ("ddp, O2", torch.float16, set()),
        ("fsdp2", torch.bfloat16, {"", "body", "head"}),
        ("fsdp2, fp16", torch.float16, {"", "body", "head"}),
        ("fsdp2, rules", torch.float32, {"", "body", "body.0", "head"}),
        ("fsdp2, off", torch.float32, {"", "body"}),
    ],
)
def test_excluded_modules_are_in_fp32_which_fsdp2_gathers_apart_and_the_rest_in_half(
    seen: dict[str, Seen], way: str, body: torch.dtype, apart: set[str]
) -> None:
    assert seen[way].weight_dtypes == {"body.0": body, "head": torch.float32}
    assert seen[way].gathered_apart == apart


def test_no_weight_is_renamed_and_under_fsdp2_undo_says_why_it_cannot(seen: dict[str, Seen]) -> None:
    assert {tuple(way.state_keys) for way in seen.values()} == {tuple(net().state_dict())}
    assert seen["ddp"].undo_says == ""
    assert "the class of head was changed again after the policy was applied" in seen["fsdp2"].undo_says


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
    apply(Policy(autocast="bf16"), nn.Sequential(FSDPLinear(4, 4))).undo()  # one that changes no module


TIED = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
TIED[1].weight = TIED[0].weight


@pytest.mark.parametrize(
    ("policy", "model", "more", "says"),
    [
        (O2, net(), {}, "holds whole weights in half"),
        (POLICY, net(), {"mp_policy": None}, "leave mp_policy out"),
        (
            CHANNELS_LAST,
            nn.Sequential(nn.Conv2d(3, 4, 3)),
            {},
            r"contiguous weights alone, and 0\.weight is not",
        ),
        (
            Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),)),
            TIED,
            {},
            "Linear is kept in FP32 and shares weights with 0, which",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(policy: Policy, model: nn.Module, more: dict[str, Any], says: str) -> None:
    with apply(policy, model) as tuned, pytest.raises(PolicyApplyError, match=says):
        fully_shard(tuned.model, tuned, **more)


def test_a_compiled_model_is_sharded_before_it_is_compiled() -> None:
    model: Any = torch.compile(net(), backend="eager")
    with apply(Policy(), net()) as tuned, pytest.raises(PolicyApplyError, match=r"before torch\.compile"):
        fully_shard(model, tuned)
