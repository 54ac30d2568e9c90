"""A bench whose workload shards its model, in a process group of one rank: what a trial leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amptune import Fp32Rule, Policy, Tuned
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.step import Stepper
from amptune.measure.bench.trial_group import TrialGroup
from amptune.policy.settings import STOCK
from amptune.runtime.integrations import fsdp as integration

GROUP = TrialGroup(get_none=False)
BF16 = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="0"),), fp32_math="tf32", threads=1)


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch does not say that it exports it
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def fully_shard(model: nn.Module, tuned: Tuned, **options: Any) -> nn.Module:
    return integration.fully_shard(model, tuned, mesh=init_device_mesh("cpu", (1,)), **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def bench_of(parallel: Any, **parts: Any) -> Bench:
    return Bench(workload_of(net, parallel=parallel, **parts), CPU)


def flags() -> tuple[object, ...]:
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


def test_a_trial_leaves_the_benchs_model_and_the_processs_flags_as_they_were() -> None:
    trained: list[nn.Module] = []

    def parallel(model: nn.Module, tuned: Tuned) -> nn.Module:
        trained.append(model)
        return fully_shard(model, tuned)

    bench = bench_of(parallel)
    own, before, weights = bench.model, flags(), [one.detach().clone() for one in bench.model.parameters()]
    for policy in (BF16, STOCK):
        with bench.on_device(policy, group=GROUP) as (tuned, step):
            assert isinstance(tuned.model, fsdp.FSDPModule)
            step()
            assert torch.get_num_threads() == (policy.threads or before[0])
        assert flags() == before
    assert bench.model is own
    assert type(own) is nn.Sequential
    assert all(map(torch.equal, own.parameters(), weights))
    assert len({*map(id, [*trained, own])}) == 3


def test_a_trial_that_is_refused_halfway_leaves_flags_as_they_were() -> None:
    def parallel(model: nn.Module, tuned: Tuned) -> nn.Module:
        fully_shard(model.get_submodule("0"), tuned)
        raise ValueError("not the rest")

    bench, before = bench_of(parallel), flags()
    with pytest.raises(Exception, match="not the rest"), bench.on_device(BF16, group=GROUP):
        pass
    assert flags() == before


def test_the_optimizer_is_built_over_the_sharded_weights() -> None:
    bench = bench_of(fully_shard)
    with bench.on_device(STOCK, group=GROUP) as (tuned, step):
        (held,) = (group["params"] for group in step.optimizers[0].param_groups)
        assert {type(one.data).__name__ for one in held} == {"DTensor"}
        assert [*map(id, held)] == [*map(id, tuned.model.parameters())]


def test_the_gradient_norm_counts_weights_that_are_not_sharded_too() -> None:
    def without_the_last(model: nn.Module, tuned: Tuned) -> nn.Module:
        return fully_shard(model, tuned, ignored_params=set(model.get_submodule("2").parameters()))

    def first_step(bench: Bench, group: TrialGroup | None) -> Any:
        with bench.on_device(STOCK, group=group) as (_, step):
            return step.first_step()

    bench = bench_of(without_the_last)
    assert first_step(bench, GROUP) == pytest.approx(first_step(bench, None))


def test_without_a_group_the_model_stays_whole() -> None:
    with bench_of(fully_shard).on_device(STOCK) as (tuned, _):
        assert not isinstance(tuned.model, fsdp.FSDPModule)


def test_a_wrapper_is_put_around_what_the_policy_made_of_the_model() -> None:
    compiled = Policy(compile="default")
    bench = bench_of(lambda _, tuned: DistributedDataParallel(tuned.model))
    with bench.on_device(compiled, group=GROUP) as (tuned, step):
        assert isinstance(step, Stepper)
        assert tuned.model in step._model.modules()
    bench = bench_of(lambda model, _: DistributedDataParallel(model))
    with bench.on_device(STOCK, group=GROUP):
        pass
    said = r"returned a DistributedDataParallel without tuned\.model in it, .* wrap tuned\.model, not model"
    with pytest.raises(TargetError, match=said), bench.on_device(compiled, group=GROUP):
        pass
