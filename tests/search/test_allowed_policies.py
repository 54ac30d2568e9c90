"""What a space allows, as points and as policies: both say the same, and a pin leaves what has its value."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.recorded import RecordedEvaluator

from amptune.policy.settings import STOCK
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import Point, forbidden_because
from amptune.search.space.space_file import space_names

PINNED = ("autocast", "memory_format", "cudnn_benchmark", "fused_optimizer")


@cache
def candidates(space: str, pin: tuple[str, str] | None = None) -> Candidates:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    return candidates_for(prepared, Wanted(baseline=STOCK, pins=dict([pin] if pin else ()), space=space))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(space_names()), st.sampled_from(PINNED), st.data())
def test_the_policy_of_every_allowed_point_is_allowed_and_by_a_pin_if_it_has_its_value(
    name: str, knob: str, data: st.DataObject
) -> None:
    tried = candidates(name)
    point = Point({one.name: data.draw(st.sampled_from(one.choices)) for one in tried.space.knobs})
    if forbidden_because(tried.space, point) is not None:
        return
    policy = tried.policy_of(point)
    assert tried.allows(policy)
    value = data.draw(st.sampled_from(tried.space.choices(knob) or (None,)))
    if value is not None:
        pinned = candidates(name, (knob, str(value).lower()))
        assert pinned.allows(policy) == (getattr(policy, knob) == value)
