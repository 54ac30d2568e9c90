"""Compiled policies on a bench: what is kept, what is forgotten, what is told.

What is kept and told is the same whatever code comes out, so there the compiler is a backend that compiles nothing, on
a clock that says that it took long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import CPU, QUICK, Called, measured, workload_of
from scripted import ScriptedClock
from torch import nn

from amptune import Policy
from amptune.measure.bench import bench as bench_module
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Failure
from amptune.policy.settings import STOCK

# PyTorch's own, when its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")

COMPILED = Policy(compile="default")
COMPILING_S = 30.0


@pytest.fixture(autouse=True)
def _nothing_lies_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch.compiler.reset()


class CompilingClock(ScriptedClock):
    """A step takes 10 ms, and to compile a graph takes `COMPILING_S`."""

    def backend(self, graph: Any, _inputs: object) -> Callable[..., Any]:
        self._now_s += COMPILING_S
        forward: Callable[..., Any] = graph.forward
        return forward


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CompilingClock:
    scripted = CompilingClock()
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_with(model, backend=scripted.backend))
    monkeypatch.setattr(bench_module, "clock_for", lambda _: scripted)
    return scripted


def growing() -> nn.Module:
    """Computes with a number of its own that is another one in every step, which no graph can foresee."""

    def call(own: Any, x: torch.Tensor) -> Any:
        own.times += 1
        return own.linear(x) * own.times

    return Called(call, linear=nn.Linear(8, 8), times=0)


def net(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *between, nn.Linear(16, 1))


@pytest.mark.usefixtures("clock")
def test_what_was_compiled_is_used_again_for_the_same_policy_alone_and_trains_as_the_eager_one() -> None:
    bench = Bench(workload_of(net()), CPU)
    trials, eager = [], measured(bench)
    for policy in (COMPILED, COMPILED, STOCK, COMPILED):
        outcome = measured(bench, policy)
        assert outcome.losses[:3] == pytest.approx(eager.losses[:3], rel=1e-4)
        assert (outcome.graph_breaks, outcome.recompiled) == ((), 0)
        trials.append((bench._compilations.graphs, outcome.startup_s))
    graphs, startup_s = zip(*trials, strict=True)
    assert graphs == (1, 0, 0, 1)  # each since its trial began
    assert startup_s == pytest.approx([COMPILING_S, 0.0, 0.0, COMPILING_S], abs=0.02)  # to within a step or two


@pytest.mark.usefixtures("clock")
def test_a_graph_break_is_told() -> None:
    talking = Called(lambda _, x: (torch._dynamo.graph_break("it has something to say"), x)[1])
    (found,) = measured(Bench(workload_of(net(talking)), CPU), COMPILED).graph_breaks
    assert "graph_break()" in found
    assert "Hint" not in found


@pytest.mark.usefixtures("clock")
def test_a_model_that_is_compiled_again_and_again_is_told_of() -> None:
    slow = lambda model: torch.optim.SGD(model.parameters(), lr=1e-5)  # noqa: E731
    bench = Bench(workload_of(growing(), optimizer=slow), CPU)
    outcome = bench.measure(COMPILED, Effort(warmup_s=0.2, measure_s=0.1))
    assert not isinstance(outcome, Failure)
    assert bench._compilations.graphs > 5  # until PyTorch gives it up, and runs it uncompiled
    assert 0 < outcome.recompiled < bench._compilations.graphs  # those of the first steps are the start's


def test_a_trial_above_the_memory_allowed_is_out_of_memory() -> None:
    for allowed_mib, words in ((1.0, "1 MiB allowed"), (1 / 1024, "above the 0.00098 MiB allowed")):
        outcome = Bench(workload_of(nn.Linear(8, 8)), CPU, memory_mib=allowed_mib).measure(STOCK, QUICK)
        assert isinstance(outcome, Failure)
        assert outcome.kind == "oom"
        assert words in outcome.message


def test_large_batches_are_held_twice_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.measure.bench.drawn_batches.LARGE_BYTES", 1000)
    monkeypatch.setattr("amptune.measure.bench.drawn_batches.KEPT_BYTES", 1500)
    drawn = Bench(workload_of(nn.Linear(8, 8)), CPU).drawn
    assert len(drawn.sequence(4)) == 7  # of 128 bytes
    assert len(drawn.sequence(64)) == 2
    assert len(drawn.sequence(128)) == 2
    assert {samples for _, samples, _ in drawn._kept} == {4, 128}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch 2.11 records one before the first
def test_cuda_graphs_are_kept_for_their_policy_and_their_memory_given_back_before_another() -> None:
    layers = (nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(230400, 8))
    bench = Bench(workload_of(nn.Sequential(*layers), (3, 64, 64), batch_size=64), torch.device("cuda"))
    graphs = Policy(compile="reduce-overhead", autocast="bf16")
    measured(bench, graphs)
    assert bench._compilations.graphs > 0
    measured(bench, graphs)
    assert bench._compilations.graphs == 0  # since the second trial began
    held = torch.cuda.memory_reserved()
    assert held > 0
    measured(bench)
    assert torch.cuda.memory_reserved() < held / 4
