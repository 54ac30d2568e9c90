"""Linears in FP8, and the compiler's budget of activations, in the search: tried where they may pay, and judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in

from amptune.errors import SpaceError
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Module, Prepared
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import STOCK, Float8Rule, Policy
from amptune.search.decide.decision import Decision
from amptune.search.gate.judgement import Judgement, judged
from amptune.search.gate.judgements import Judgements
from amptune.search.gate.numeric_findings import line_to_look
from amptune.search.pipeline import tune_with
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import points
from amptune.search.space.space_file import space_names

LAYERS = range(3)
WIDE = tuple(f"layers.{n}.mlp.{m}" for n in LAYERS for m in ("up", "down"))
MODULES = (
    Module(path="embed", types=("Embedding", "Module")),
    Module(path="layers", types=("ModuleList", "Module"), runs=False),
    *(
        Module(path=f"layers.{n}{path}", types=(kind, "Module"))
        for n in LAYERS
        for path, kind in (
            ("", "Block"),
            (".narrow", "Linear"),
            (".mlp", "Mlp"),
            (".mlp.up", "Linear"),
            (".mlp.act", "GELU"),
            (".mlp.down", "Linear"),
        )
    ),
    Module(path="head", types=("Linear", "Module")),
)
RULES = (Float8Rule(type="Mlp"),)


class Decoder(RecordedEvaluator):
    """A recorded H200 whose model has wide Linears and repeated blocks."""

    def prepare(self, limit_s: float) -> Prepared:
        prepared = super().prepare(limit_s)
        subject = replace(prepared.subject, wide_linears=WIDE, modules=MODULES, repeated_leaves=4)
        return replace(prepared, subject=subject)


def candidates(
    of: type[RecordedEvaluator], space: str = "hopper", *, saves_memory: bool = False, **pins: str
) -> Candidates:
    wanted = Wanted(baseline=STOCK, space=space, pins=pins, saves_memory=saves_memory)
    return candidates_for(of("resnet50").prepare(1.0), wanted)


def ms_of(policy: Policy) -> float:
    half = 0.5 if policy.autocast != "off" else 1.0
    compiled = 1.0 if policy.compile == "off" else 0.8
    return 100.0 * half * compiled * (0.85 if policy.float8_modules else 1.0)


def tuned(machine: RecordedEvaluator, folder: Path, seconds: float) -> Decision:
    request = request_in(folder, machine.clock, trials=None)
    return tune_with(machine, replace(request, budget=replace(request.budget, seconds=seconds)), lambda _: None)


# --- FP8 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["ada", "hopper", "blackwell"])
def test_all_wide_linears_or_none_are_tried_with_bf16_and_a_compiler(space: str) -> None:
    found = candidates(Decoder, space)
    policies = {found.policy_of(point) for point in points(found.space)}
    assert {policy.float8_modules for policy in policies} == {(), RULES}
    in_float8 = [policy for policy in policies if policy.float8_modules]
    assert all(policy.autocast == "bf16" and policy.compile != "off" for policy in in_float8)
    assert all(map(found.allows, in_float8))
    assert not found.allows(replace(in_float8[0], float8_modules=(Float8Rule(path="head"),)))


@pytest.mark.parametrize("space", sorted(set(space_names()) - {"ada", "hopper", "blackwell"}))
def test_other_gpus_and_cpus_do_not_try_it(space: str) -> None:
    assert not candidates(Decoder, space).space.choices("float8_modules")


def test_a_narrow_model_has_the_same_space_and_study_as_without_it() -> None:
    narrow = candidates(RecordedEvaluator)
    assert not narrow.space.choices("float8_modules")
    assert not any("float8_modules" in dict(rule.when) for rule in narrow.space.forbid)
    assert narrow.space == replace(
        candidates(RecordedEvaluator, "ampere").space,
        **{name: getattr(narrow.space, name) for name in ("architecture", "compute_capability", "forbid")},
    )


def test_pinned_without_a_wide_linear_is_an_error() -> None:
    with pytest.raises(SpaceError, match="--set float8_modules=wide is for Linears of 4096 × 2048 and more"):
        candidates(RecordedEvaluator, float8_modules="wide")
    pinned = candidates(Decoder, float8_modules="wide")
    in_bf16 = (pinned.policy_of(point) for point in points(pinned.space) if point["autocast"] == "bf16")
    assert {policy.float8_modules for policy in in_bf16} == {RULES}


def test_it_is_found_judged_and_told_to_be_looked_at_for_long(tmp_path: Path) -> None:
    machine = Decoder("resnet50", noise=0.002, true_ms=ms_of, compile_s=20.0)
    decision = tuned(machine, tmp_path, seconds=300.0)
    assert decision.policy.float8_modules == RULES
    assert any(policy.float8_modules for policy in machine.judged)
    [finding] = [one for one in decision.findings if one.code == "float8-judged-briefly"]
    assert "amptune verify POLICY.yaml TARGET --numerics --steps 5000" in finding.message


def test_the_second_graph_is_in_fp8(tmp_path: Path) -> None:
    machine = Decoder("resnet50", true_ms=ms_of, compile_s=20.0)
    tuned(machine, tmp_path, seconds=200.0)
    assert [bool(policy.float8_modules) for policy in machine.compiled_behind[:3]] == [False, True, False]


def test_a_judgement_of_a_graph_in_fp8_says_nothing_of_one_in_bf16() -> None:
    bf16 = Policy(autocast="bf16", compile="default")
    fp8 = replace(bf16, float8_modules=RULES)
    failed = judged(fp8, Parity(failure=Failure(kind="nonfinite", message="nan")))
    none: Judgements[Judgement] = Judgements(STOCK)
    known = none.also(failed)
    assert known.rejection_of(fp8) is failed
    assert known.rejection_of(bf16) is None
    assert line_to_look(failed) == "`amptune verify POLICY.yaml TARGET --numerics`"
