"""Blocks computed again in the search: tried to save memory, on models that have repeated blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in
from torch import nn

from amptune import Workload
from amptune.changes.blocks import repeated_paths
from amptune.errors import SpaceError
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.results.subject import Module, Prepared
from amptune.policy.settings import STOCK, Policy
from amptune.runtime.apply_policy import apply
from amptune.search.pipeline import tune_with
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.chosen_modules import checkpoints_of
from amptune.search.space.knobs import points
from amptune.search.space.space_file import space_names
from amptune.search.table.objective import objective_of

BLOCKS = tuple(f"layers.{n}" for n in range(5))
MODULES = (
    Module(path="layers", types=("ModuleList", "Module"), runs=False),
    *(Module(path=path, types=("Block", "Module")) for path in BLOCKS),
    Module(path="head", types=("Linear", "Module")),
)
ALL, ALTERNATE = ("layers",), ("layers.0", "layers.2", "layers.4")


class Blocks(RecordedEvaluator):
    """A recorded machine whose model has five equal blocks."""

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        return replace(prepared, subject=replace(prepared.subject, blocks=BLOCKS, modules=MODULES))


def candidates(space: str = "cpu", *, saves_memory: bool = True, **pins: str) -> Candidates:
    wanted = Wanted(baseline=STOCK, space=space, pins=pins, saves_memory=saves_memory)
    return candidates_for(Blocks("resnet50").prepare(1.0), wanted)


def tried(of: Candidates) -> set[tuple[str, ...]]:
    return {of.policy_of(point).checkpoint for point in points(of.space)}


@pytest.mark.parametrize("space", sorted(space_names()))
def test_every_space_tries_none_every_second_and_all_of_the_repeated_blocks(space: str) -> None:
    found = candidates(space, memory_format="contiguous")
    assert tried(found) == {(), ALTERNATE, ALL}
    assert found.policy_of(found.space.try_first[0]).checkpoint == ALL
    assert not any(found.policy_of(point).cuda_graphs for point in points(found.space) if point["checkpoint"] != "none")


def test_only_a_search_that_saves_memory_has_it_and_its_study_is_the_same() -> None:
    fast = candidates(saves_memory=False)
    assert tried(fast) == {()}
    assert "checkpoint" not in {knob.name for knob in fast.space.knobs}
    assert fast.study_name == candidates().study_name
    assert fast.study_name != candidates(checkpoint="all").study_name


def test_it_can_be_pinned_for_any_objective() -> None:
    assert tried(candidates(saves_memory=False, checkpoint="all")) == {ALL}
    assert tried(candidates(checkpoint="none")) == {()}
    with pytest.raises(SpaceError, match="checkpoint=some: 'some' is not one of none, alternate, all"):
        candidates(checkpoint="some")


def test_a_model_without_repeated_blocks_has_no_such_choice() -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    none = candidates_for(prepared, Wanted(baseline=STOCK, space="cpu", pins={}, saves_memory=True))
    assert tried(none) == {()}
    pins = {"checkpoint": "all"}
    with pytest.raises(SpaceError, match="--set checkpoint=all is for repeated blocks, and the model has none"):
        candidates_for(prepared, Wanted(baseline=STOCK, space="cpu", pins=pins))


def test_a_policy_of_ones_own_is_allowed_where_its_blocks_are_a_choice() -> None:
    assert candidates().allows(Policy(checkpoint=ALL, batch_size=None))
    assert not candidates(checkpoint="none").allows(Policy(checkpoint=ALL))
    assert not candidates().allows(Policy(checkpoint=("head",)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class Stages(nn.Module):
    """Two stages of blocks, one of which runs by itself, and a head that equals nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block(8) for _ in range(3)))
        self.between = nn.Linear(8, 16)
        self.second = nn.ModuleList(Block(16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.first(x))
        for block in self.second:
            x = block(x)
        return x


def test_blocks_are_found_in_the_models_order_and_patterns_name_these_alone() -> None:
    workload = Workload(
        model=Stages,
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=4,
    )
    subject = inspect_model(Bench(workload, torch.device("cpu")), "")
    every = [*(f"first.{n}" for n in range(3)), *(f"second.{n}" for n in range(12))]
    assert list(subject.blocks) == every == repeated_paths(Stages())
    named = checkpoints_of(subject)
    assert list(named) == ["none", "alternate", "all"]
    for choice, expected in (("alternate", every[::2]), ("all", every)):
        model = Stages()
        with apply(Policy(checkpoint=named[choice]), model):
            swapped = [path for path, one in model.named_modules() if type(one) is not Block and isinstance(one, Block)]
        assert swapped == expected


@pytest.mark.parametrize(("least_speed", "wins"), [(0.5, ALL), (1.0, ())])
def test_it_wins_where_it_takes_the_least_memory_and_may_take_the_time(
    least_speed: float, wins: tuple[str, ...], tmp_path: Path
) -> None:
    share = {(): 1.0, ALTERNATE: 0.7, ALL: 0.4}
    slower = {(): 1.0, ALTERNATE: 1.15, ALL: 1.3}
    machine = Blocks(
        "resnet50",
        noise=0.002,
        true_ms=lambda policy: 100.0 * slower[policy.checkpoint],
        peak_mib=lambda policy: 5000.0 * share[policy.checkpoint],
    )
    request = request_in(tmp_path, machine.clock, trials=20, space="cpu", compile=False)
    decision = tune_with(machine, replace(request, objective=objective_of("memory", least_speed)), lambda _: None)
    assert decision.policy.checkpoint == wins
    assert [one.variant.setting for one in decision.ablation] == (["checkpoint: layers"] if wins else [])
