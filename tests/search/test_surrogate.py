"""What is believed of policies that were not measured."""

from __future__ import annotations

import itertools
import math

from amptune.search.sampler.acquisition import Proposal, Proposer, Seen
from amptune.search.space.knobs import Dimension, Point

KNOBS = (
    Dimension(name="autocast", choices=("off", "bf16", "fp16")),
    Dimension(name="memory_format", choices=("contiguous", "channels_last")),
    Dimension(name="cudnn_benchmark", choices=(False, True)),
    Dimension(name="fused_optimizer", choices=(False, True)),
    Dimension(name="fp32_exclusions", choices=(0, 1, 2, 3, 4, 5)),
)
POINTS = [
    Point(dict(zip([knob.name for knob in KNOBS], values, strict=True)))
    for values in itertools.product(*(knob.choices for knob in KNOBS))
]


def speed(point: Point) -> float:
    """Settings bring what they bring, and half precision and channels_last bring more together."""
    own = {"off": 0.0, "bf16": 0.2, "fp16": 0.25}[str(point["autocast"])]
    together = 0.4 if own and point["memory_format"] == "channels_last" else 0.0
    return math.exp(own + together + 0.02 * bool(point["fused_optimizer"]) - 0.03 * int(point["fp32_exclusions"]))


SPEEDS = [speed(point) for point in POINTS]
SEEN = {i: Seen(score=SPEEDS[i], seconds=1.0) for i in range(0, len(POINTS), 30)}


def proposed(seen: dict[int, Seen]) -> Proposal:
    proposal = Proposer(KNOBS, POINTS, seed=0).next(seen)
    assert proposal is not None
    assert proposal.index not in seen
    return proposal


def test_the_best_of_a_space_is_found_in_a_fraction_of_it_and_the_expected_gain_falls() -> None:
    seen, gains = dict(SEEN), []
    while max(one.score or 0.0 for one in seen.values()) < max(SPEEDS):
        proposal = proposed(seen)
        gains.append(proposal.gain)
        seen[proposal.index] = Seen(score=SPEEDS[proposal.index], seconds=1.0)
    assert len(seen) <= 30 < len(POINTS) / 4
    assert proposed(seen).gain < gains[0]


def test_what_fails_is_kept_away_from_and_of_two_as_promising_the_cheaper_is_tried() -> None:
    seen = {i: Seen(score=SPEEDS[i], seconds=1.0) for i in range(0, len(POINTS), 5)}
    failing = {i: Seen(score=None, seconds=1.0) for i in seen if POINTS[i]["autocast"] == "fp16"}
    assert POINTS[proposed({**seen, **failing}).index]["autocast"] == "bf16"
    dear = {i: Seen(score=SPEEDS[i], seconds=20.0) for i in seen if POINTS[i]["cudnn_benchmark"]}
    assert POINTS[proposed({**seen, **dear}).index]["cudnn_benchmark"] is False
