"""Spaces as values: what pinning, restricting and forbidding leave of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.search.space.knobs import (
    Dimension,
    Forbidden,
    Point,
    Space,
    Value,
    digest,
    pin,
    points,
    reason_against,
    with_choices,
)

CHOICES: dict[str, tuple[Value, ...]] = {
    "autocast": ("off", "bf16", "fp16"),
    "fp32_math": ("stock", "tf32", "ieee"),
    "memory_format": ("contiguous", "channels_last"),
    "cudnn_benchmark": (False, True),
    "fp32_exclusions": (0, 1, 2),
}
NO_MEANING = Forbidden(when=(("autocast", ("off",)), ("fp32_exclusions", (1, 2))), because="nothing to keep out")
SPACE = Space(
    architecture="made-up",
    compute_capability=("9.0",),
    knobs=tuple(Dimension(name=name, choices=choices) for name, choices in CHOICES.items()),
    try_first=(
        Point({name: choices[0] for name, choices in CHOICES.items()} | {"autocast": "fp16", "cudnn_benchmark": True}),
        Point({name: choices[0] for name, choices in CHOICES.items()} | {"fp32_math": "tf32"}),
    ),
    forbid=(NO_MEANING,),
)


@st.composite
def parts_of(draw: st.DrawFn, choices: tuple[Value, ...], least: int = 1) -> tuple[Value, ...]:
    kept = draw(st.sets(st.sampled_from(range(len(choices))), min_size=least))
    return tuple(choices[i] for i in sorted(kept))


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    knobs = {str(name): draw(parts_of(CHOICES[str(name)])) for name in draw(parts_of(tuple(CHOICES)))}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        names = draw(parts_of(tuple(knobs)))
        when = tuple((str(name), draw(parts_of(knobs[str(name)]))) for name in names)
        rules.append(Forbidden(when=when, because="drawn"))
    space = Space(
        architecture="drawn",
        compute_capability=(),
        knobs=tuple(Dimension(name=name, choices=choices) for name, choices in knobs.items()),
        forbid=tuple(rules),
    )
    allowed = list(points(space))
    return replace(space, try_first=tuple(draw(st.lists(st.sampled_from(allowed), max_size=4)) if allowed else ()))


def a_knob(data: st.DataObject, space: Space) -> Dimension:
    return data.draw(st.sampled_from(space.knobs))


def as_text(value: Value) -> str:
    return str(value).lower()


@given(spaces())
def test_every_combination_is_either_a_point_or_forbidden_for_a_reason(space: Space) -> None:
    names = [knob.name for knob in space.knobs]
    every = [
        Point(dict(zip(names, values, strict=True)))
        for values in itertools.product(*(knob.choices for knob in space.knobs))
    ]
    allowed = list(points(space))
    assert allowed == [point for point in every if reason_against(point, space.forbid) is None]
    for point in every:
        forbidden = any(all(point[name] in values for name, values in rule.when) for rule in space.forbid)
        assert reason_against(point, space.forbid) == ("drawn" if forbidden else None)


@given(spaces(), st.data())
def test_restricting_keeps_the_points_with_those_values_and_pinning_those_with_one(
    space: Space, data: st.DataObject
) -> None:
    """A pin may allow more points than before: a rule that forbids a value does not hold against one that is asked."""
    knob = a_knob(data, space)
    kept = data.draw(parts_of(knob.choices))
    left = with_choices(space, knob.name, kept)
    assert set(points(left)) == {point for point in points(space) if point[knob.name] in kept}
    assert set(left.try_first) == {point for point in space.try_first if point[knob.name] in kept}
    pinned = pin(space, knob.name, as_text(kept[0]))
    assert set(points(pinned)) >= {point for point in points(space) if point[knob.name] == kept[0]}
    assert pinned.choices(knob.name) == kept[:1]
    assert set(pinned.try_first) <= set(points(pinned))
    other = a_knob(data, space)
    if other.name != knob.name:
        pins = (knob.name, as_text(kept[0])), (other.name, as_text(data.draw(st.sampled_from(other.choices))))
        assert list(points(pin(pin(space, *pins[0]), *pins[1]))) == list(points(pin(pin(space, *pins[1]), *pins[0])))


@given(spaces(), st.data())
def test_starting_points_keep_their_order_move_to_the_value_given_and_merge(space: Space, data: st.DataObject) -> None:
    knob = a_knob(data, space)
    kept = data.draw(parts_of(knob.choices))
    moved = with_choices(space, knob.name, kept, kept[0])
    expected = [one if one[knob.name] in kept else Point({**one, knob.name: kept[0]}) for one in space.try_first]
    assert moved.try_first == tuple(point for point in dict.fromkeys(expected) if point in set(points(moved)))


@given(spaces(), st.data())
def test_one_more_knob_multiplies_the_space_and_starts_at_todays_value(space: Space, data: st.DataObject) -> None:
    wider = with_choices(space, "batch_size", (16, 32, 64), 32)
    assert len(list(points(wider))) == 3 * len(list(points(space)))
    assert {point["batch_size"] for point in wider.try_first} <= {32}
    knob = a_knob(data, space)
    rule = Forbidden(when=((knob.name, knob.choices[:1]),), because="one more")
    different = [wider, replace(space, forbid=(*space.forbid, rule))]
    assert digest(space) not in map(digest, different)
    reworded = tuple(replace(rule, because="for another reason") for rule in space.forbid)
    assert digest(space) == digest(replace(space, try_first=(), forbid=reworded))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cudnn_benchmark", "False", False),
        ("memory_format", "channels_last_3d", "channels_last_3d"),  # legal, and no choice of the space
        ("fp32_exclusions", "9", 9),
    ],
)
def test_a_pin_is_read_from_its_text(name: str, text: str, value: Value) -> None:
    assert {point[name] for point in points(pin(SPACE, name, text))} == {value}
