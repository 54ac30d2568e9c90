"""A bench whose workload shards its model, in a group of one rank and a process of its own: what a trial leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from torch import distributed, multiprocessing, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from amptune import Fp32Rule, Policy, Tuned
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.trial_group import TrialGroup
from amptune.policy.settings import STOCK
from amptune.runtime.integrations import fsdp as integration

GROUP = TrialGroup(get_none=False)
BF16 = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="0"),), fp32_math="tf32", threads=1)


def fully_shard(model: nn.Module, tuned: Tuned, **options: Any) -> nn.Module:
    return integration.fully_shard(model, tuned, mesh=init_device_mesh("cpu", (1,)), **options)


def bench_of(parallel: Any) -> Bench:
    return Bench(workload_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), parallel=parallel), CPU)


def flags() -> tuple[object, ...]:
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


def leaves_model_and_flags_as_they_were() -> None:
    def parallel(model: nn.Module, tuned: Tuned) -> nn.Module:
        trained.append(model)
        fully_shard(model.get_submodule("0"), tuned)
        if len(trained) == 3:
            raise ValueError("not the rest")
        return fully_shard(model, tuned)

    trained: list[nn.Module] = []
    bench = bench_of(parallel)
    own, before, weights = bench.model, flags(), [one.detach().clone() for one in bench.model.parameters()]
    for policy in (BF16, STOCK):
        with bench.on_device(policy, group=GROUP) as (tuned, step):
            assert isinstance(tuned.model, fsdp.FSDPModule)
            (held,) = (group["params"] for group in step.optimizers[0].param_groups)
            assert [*map(id, held)] == [*map(id, tuned.model.parameters())]
            step()
            assert torch.get_num_threads() == (policy.threads or before[0])
        assert flags() == before
    with pytest.raises(Exception, match="not the rest"), bench.on_device(BF16, group=GROUP):
        pass
    assert flags() == before
    assert bench.model is own
    assert type(own) is nn.Sequential
    assert all(map(torch.equal, own.parameters(), weights))
    assert len({*map(id, [*trained, own])}) == 4


def counts_weights_that_are_not_sharded_in_the_gradient_norm() -> None:
    def first_step(group: TrialGroup | None) -> Any:
        with bench.on_device(STOCK, group=group) as (tuned, step):
            assert isinstance(tuned.model, fsdp.FSDPModule) == (group is not None)
            return step.first_step()

    bench = bench_of(lambda model, tuned: fully_shard(model, tuned, ignored_params={*model[1].parameters()}))
    assert first_step(GROUP) == pytest.approx(first_step(None))


def refuses_a_wrapper_around_another_model_than_the_policys() -> None:
    bench = bench_of(lambda model, _: DistributedDataParallel(model))
    with bench.on_device(STOCK, group=GROUP):
        pass
    said = r"returned a DistributedDataParallel without tuned\.model in it, .* wrap tuned\.model, not model"
    with pytest.raises(TargetError, match=said), bench.on_device(Policy(compile="default"), group=GROUP):
        pass
    with bench_of(with_tuned_model).on_device(Policy(compile="default"), group=GROUP):
        pass


def with_tuned_model(_: nn.Module, tuned: Tuned) -> nn.Module:
    return DistributedDataParallel(tuned.model)


def _in_a_group(_: int) -> None:
    torch.set_num_threads(2)
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch does not say that it exports it
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    leaves_model_and_flags_as_they_were()
    counts_weights_that_are_not_sharded_in_the_gradient_norm()
    refuses_a_wrapper_around_another_model_than_the_policys()
    distributed.destroy_process_group()


def test_a_trial_of_a_shared_model() -> None:
    multiprocessing.spawn(_in_a_group, nprocs=1)  # type: ignore[attr-defined,no-untyped-call]
