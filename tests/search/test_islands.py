"""FP32 islands in a search: TF32 for them is tried where it can pay, and people are told where they are."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.recorded import H200, RecordedEvaluator

from amptune.measure.results.half_effects import Island, Sensitivity
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.islands import WORTH_TRYING, islands_finding, islands_refinement
from amptune.search.space.space_file import load_space

HOPPER, CPU = load_space("hopper"), load_space("cpu")
ON_CPU = replace(H200, gpu=None, device="cpu")
TURING = replace(H200, gpu=replace(H200.gpu, tf32=False))  # type: ignore[type-var]
BF16 = amp_recipe("bf16", compile="default", fused_optimizer=True)
STEP_MS = 10.0


def island(
    ms: float, tf32_ms: float | None = 0.0, module: str | None = "encoder.attn", where: str = "model.py:88"
) -> Island:
    return Island(module=module, where=where, ms=ms, tf32_ms=tf32_ms, share=ms / STEP_MS)


def sensed(*islands: Island) -> Sensitivity:
    return Sensitivity(modules=(), cast_ms_per_byte=1e-9, islands=islands)


SLOW = sensed(island(1.2, 0.4))


@pytest.mark.parametrize(
    ("leader", "found", "of", "tried"),
    [
        (BF16, SLOW, {}, True),
        (replace(BF16, fp32_math="ieee"), SLOW, {}, True),
        (replace(BF16, fp32_modules=(Fp32Rule(path="head"),)), SLOW, {}, True),
        (replace(BF16, fp32_math="tf32"), SLOW, {}, False),
        (STOCK, SLOW, {}, False),
        (Policy(weights="half"), SLOW, {}, False),
        (BF16, sensed(), {}, False),
        (BF16, sensed(island(0.19)), {}, False),
        (BF16, sensed(island(0.1), island(0.1)), {}, True),
        (BF16, sensed(island(5.0, 4.9)), {}, False),
        (BF16, sensed(island(5.0, None)), {}, False),
        (BF16, sensed(island(0.1)), {"step_ms": 4.0}, True),
        (BF16, SLOW, {"step_ms": 100.0}, False),
        (BF16, SLOW, {"space": CPU}, False),
        (BF16, SLOW, {"hardware": ON_CPU}, False),
        (BF16, SLOW, {"hardware": TURING}, False),
    ],
)
def test_tf32_is_tried_for_the_leader_where_it_saves_enough_of_its_step(
    leader: Policy, found: Sensitivity, of: dict[str, Any], *, tried: bool
) -> None:
    got = islands_refinement(leader, found, **{"space": HOPPER, "hardware": H200, **of})
    assert got == (replace(leader, fp32_math="tf32") if tried else None)


def candidates(*pins: tuple[str, str]) -> Candidates:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    return candidates_for(prepared, Wanted(baseline=STOCK, space="hopper", pins=dict(pins)))


def test_the_space_allows_tf32_under_autocast_unless_a_pin_or_the_space_has_none() -> None:
    policy = replace(BF16, compile="step", fp32_math="tf32")
    assert candidates().allows(policy)
    assert not candidates().allows(replace(policy, fp32_math="ieee"))
    assert not candidates(("fp32_math", "stock")).allows(policy)
    assert not candidates(("autocast", "fp16")).allows(policy)


def test_the_finding_names_the_places_and_what_tf32_makes_of_them() -> None:
    found = islands_finding(sensed(island(1.2, 0.4)))
    assert found is not None
    assert (found.code, found.module) == ("fp32-islands", "encoder.attn")
    assert found.message == (
        "FP32 matrix products and convolutions take 12% of a step under autocast, in encoder.attn (model.py:88): "
        "1.2 ms, or 0.4 ms in TF32 (fp32_math: tf32)"
    )
    many = islands_finding(sensed(*(island(n / 10, None, None if n == 5 else f"layers.{n}", "") for n in range(1, 6))))
    assert many is not None
    assert many.module is None
    assert many.message == (
        "FP32 matrix products and convolutions take 15% of a step under autocast, in code outside the model, "
        "layers.4, layers.3 and 2 more places: 1.5 ms; half precision is faster, if the code there lets autocast in"
    )
    assert [one["ms"] for one in many.figures["islands"]] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


@given(st.lists(st.builds(island, st.floats(0.001, 1.0), st.none() | st.floats(0.0, 1.0))))
def test_islands_are_told_of_from_a_share_on_and_survive_being_written_down(islands: list[Island]) -> None:
    found = sensed(*islands)
    share = sum(one.share for one in islands)
    assert (islands_finding(found) is not None) == (share >= WORTH_TRYING)
    assert adapter_for(Sensitivity).validate_python(asdict(found)) == found


def test_figures_of_a_version_without_islands_have_none() -> None:
    earlier = {"modules": [], "cast_ms_per_byte": 1e-9}
    assert adapter_for(Sensitivity).validate_python(earlier).islands == ()
