"""Ranks that apply different policies to one model hear of it; with other batch sizes each sample counts alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amptune.errors import PolicyApplyError
from amptune.policy.file_io import save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import STOCK, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

BF16 = Policy(autocast="bf16")
SIZES = [2, 6]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(SIZES), 4, generator=generator), torch.arange(sum(SIZES)) % 3


def trains(tuned: Tuned, passes: int) -> str:
    """The error of so many forward passes, which the ranks begin together; "" if there is none."""
    try:
        for _ in range(passes):
            dist.barrier()
            with tuned.autocast():
                tuned.model(torch.ones(2, 4))
    except PolicyApplyError as error:
        return str(error)
    return ""


def gradients_of_unequal_batches(rank: int) -> list[torch.Tensor | None]:
    model = net()
    tuned = apply(Policy(batch_size=SIZES[rank]), model)
    parallel = DistributedDataParallel(tuned.model)
    x, y = (torch.split(part, SIZES)[rank] for part in samples())
    with tuned.autocast():
        loss = nn.functional.cross_entropy(parallel(x), y)
    (tuned.rank_weight * loss).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters()]


def weight_of(policy: Policy) -> str:
    try:
        return str(apply(policy, net()).rank_weight)
    except PolicyApplyError as error:
        return str(error)


def step_of(tuned: Tuned) -> str:
    optimizer = torch.optim.SGD(tuned.model.parameters(), lr=0.1)
    tuned.training_step(lambda model, x: model(x).sum(), optimizer, model=DistributedDataParallel(tuned.model))
    try:
        tuned.training_step(lambda model, x: model(x).sum(), optimizer)
    except PolicyApplyError as error:
        return str(error)
    return ""


def _work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        path = f"{folder}/rank{rank}.yaml"
        save(PolicyFile(policy=STOCK if rank else BF16), path)
        alone = nn.Linear(3, 3) if rank else None  # the other rank has no such model
        seen = {
            "same": trains(apply(BF16, net()), 3),
            "sizes": trains(apply(replace(BF16, batch_size=SIZES[rank]), net()), 3),
            "other": trains(apply(path, net()), 3),
            "alone": "" if alone is None else str(apply(BF16, alone).autocast() and "goes on"),
            "step": step_of(apply(BF16, net())),
            "gradients": gradients_of_unequal_batches(rank),
            "weights": [weight_of(BF16), weight_of(Policy(accumulate=1 + 2 * rank))],
            "some sizes": weight_of(Policy(batch_size=8) if rank else STOCK),
        }
        torch.save(seen, f"{folder}/seen{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_work, (str(folder),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    return [torch.load(folder / f"seen{rank}.pt") for rank in range(2)]


def test_ranks_of_one_policy_go_on(seen: list[dict[str, object]]) -> None:
    assert [one["same"] for one in seen] == ["", ""]
    assert [one["sizes"] for one in seen] == ["", ""]
    assert seen[1]["alone"] == "goes on"
    assert all("model=DistributedDataParallel(tuned.model)" in str(one["step"]) for one in seen)


def test_ranks_that_meet_before_a_forward_pass_hear_of_another_policy(seen: list[dict[str, object]]) -> None:
    texts = [str(one["other"]) for one in seen]
    assert texts[0] == texts[1]
    first, of_0, of_1, todo = texts[0].splitlines()
    assert first == "the ranks of this job do not have one policy:"
    assert of_0.startswith("  rank 0 (")
    assert of_0.endswith("rank0.yaml): bf16")
    assert of_1.endswith("rank1.yaml): stock PyTorch")
    assert "AMPTUNE_REQUIRE=1" in todo


def test_each_sample_counts_alike_on_ranks_with_other_batch_sizes(seen: list[dict[str, object]]) -> None:
    model = net()
    x, y = samples()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    for one in seen:
        torch.testing.assert_close(one["gradients"], [parameter.grad for parameter in model.parameters()])


def test_the_weight_of_a_rank_is_its_share_of_all_samples(seen: list[dict[str, object]]) -> None:
    assert [one["weights"] for one in seen] == [["1.0", "0.5"], ["1.0", "1.5"]]
    for one in seen:
        assert "some ranks' policies have a batch_size and others leave it out" in str(one["some sizes"])
