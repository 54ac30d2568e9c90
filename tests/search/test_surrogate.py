"""What is believed of policies that were not measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable

import numpy as np
import pytest

from amptune.search.sampler.acquisition import Proposal, Proposer, Seen, features_of, with_features
from amptune.search.sampler.surrogate import Surrogate
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


def log_speed(point: Point) -> float:
    """Settings bring what they bring, and half precision and channels_last bring more together."""
    half = point["autocast"] != "off"
    own = {"off": 0.0, "bf16": 0.2, "fp16": 0.25}[str(point["autocast"])]
    together = 0.4 if half and point["memory_format"] == "channels_last" else 0.0
    return own + together + 0.02 * bool(point["fused_optimizer"]) - 0.03 * int(point["fp32_exclusions"])


SPEEDS = [math.exp(log_speed(point)) for point in POINTS]
BEST = max(range(len(POINTS)), key=SPEEDS.__getitem__)


def drawn(seed: int, count: int) -> dict[int, float]:
    """Log speeds of some points."""
    chosen = np.random.default_rng(seed).choice(len(POINTS), count, replace=False)
    return {int(i): log_speed(POINTS[i]) for i in chosen}


def trials(indices: Iterable[int]) -> dict[int, Seen]:
    return {i: Seen(score=SPEEDS[i], seconds=1.0) for i in indices}


def proposed(seen: dict[int, Seen], left_out: Collection[int] = (), *, running: Collection[int] = ()) -> Proposal:
    proposal = Proposer(KNOBS, POINTS, seed=0).next(seen, left_out, running=running)
    assert proposal is not None
    assert proposal.index not in {*seen, *left_out, *running}
    return proposal


def test_what_was_not_measured_is_told_from_what_its_settings_brought_elsewhere() -> None:
    seen = drawn(0, 40)
    belief = Surrogate(KNOBS, POINTS).belief(seen)
    truth = np.log(SPEEDS)
    unseen = [i for i in range(len(POINTS)) if i not in seen]
    assert np.abs(belief.mean - truth)[unseen].max() < 0.1
    assert np.corrcoef(belief.mean[unseen], truth[unseen])[0, 1] > 0.98


def test_an_outlier_among_the_measurements_does_not_count_for_much() -> None:
    seen = drawn(1, 60)
    hit = next(iter(seen))
    belief = Surrogate(KNOBS, POINTS).belief({**seen, hit: seen[hit] - 0.5})
    unseen = [i for i in range(len(POINTS)) if i not in seen]
    assert np.abs(belief.mean - np.log(SPEEDS))[unseen].mean() < 0.05
    assert belief.mean[hit] > seen[hit] - 0.4


def test_one_that_saw_the_trials_come_believes_what_one_does_that_sees_them_at_once() -> None:
    """So that any process goes on as the one before would have."""
    order = list(drawn(3, 30).items())
    kept = Surrogate(KNOBS, POINTS)
    for count in range(2, len(order)):
        found, fresh = (one.belief(dict(order[:count])) for one in (kept, Surrogate(KNOBS, POINTS)))
        assert found.mean == pytest.approx(fresh.mean)
        assert found.deviation == pytest.approx(fresh.deviation)


def test_what_runs_elsewhere_is_believed_to_turn_out_as_expected_and_is_not_proposed() -> None:
    running: list[int] = []
    for _ in range(6):
        running.append(proposed(trials(range(0, len(POINTS), 7)), running=running).index)


def test_less_than_was_expected_by_far_is_a_surprise() -> None:
    proposal = proposed(trials(range(0, len(POINTS), 3)))
    assert 0.6 * SPEEDS[proposal.index] < proposal.least < 0.97 * SPEEDS[proposal.index]


def test_the_best_of_a_space_is_found_in_a_fraction_of_it_and_the_expected_gain_falls() -> None:
    proposer, rng = Proposer(KNOBS, POINTS, seed=0), np.random.default_rng(2)
    seen = trials(range(0, 150, 30))
    gains = []
    while BEST not in seen:
        proposal = proposer.next(seen)
        assert proposal is not None
        gains.append(proposal.gain)
        seen[proposal.index] = Seen(score=SPEEDS[proposal.index] * math.exp(rng.normal(0, 0.01)), seconds=1.0)
    assert len(seen) <= 30 < len(POINTS) / 4
    assert proposed(trials({BEST, *range(0, len(POINTS), 2)})).gain < gains[0]


def test_what_fails_is_kept_away_from() -> None:
    seen = trials(range(0, len(POINTS), 4))
    failing = {i: Seen(score=None, seconds=1.0) for i in seen if POINTS[i]["autocast"] == "fp16"}
    assert POINTS[proposed({**seen, **failing}).index]["autocast"] == "bf16"


def test_of_two_as_promising_the_cheaper_is_tried() -> None:
    seen = trials(range(0, len(POINTS), 5))
    dear = {i: Seen(score=SPEEDS[i], seconds=20.0) for i in seen if POINTS[i]["cudnn_benchmark"]}
    assert POINTS[proposed({**seen, **dear}).index]["cudnn_benchmark"] is False


def test_a_space_is_proposed_to_its_end_but_for_what_is_left_out() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    seen = {0: Seen(score=1.0, seconds=1.0), 1: Seen(score=1.1, seconds=1.0)}
    wanted = {"autocast": "bf16", "cudnn_benchmark": False}
    out = [index for index, point in enumerate(POINTS) if any(point[name] != value for name, value in wanted.items())]
    while proposal := proposer.next(seen, out):
        assert proposal.index not in {*seen, *out}
        seen[proposal.index] = Seen(score=1.0, seconds=1.0)
    assert len(seen) == 2 + 2 * 2 * 6


def test_a_graph_is_known_to_be_cached_for_another_optimizer_and_not_for_another_mode() -> None:
    knobs = (
        Dimension(name="compile", choices=("off", "default", "reduce-overhead")),
        Dimension(name="fused_optimizer", choices=(False, True)),
    )
    points = [
        Point({"compile": mode, "fused_optimizer": fused}) for mode in knobs[0].choices for fused in (False, True)
    ]
    proposer = Proposer(with_features(knobs), [features_of(point) for point in points], seed=0)
    seen = {0: Seen(score=100.0, seconds=2.0), 2: Seen(score=150.0, seconds=40.0)}
    seconds = {}
    for index in (3, 4):  # the same mode with a fused optimizer, and the other mode
        proposal = proposer.next(seen, left_out={1, 3, 4, 5} - {index})
        assert proposal is not None
        seconds[index] = proposal.seconds
    assert seconds[3] == 2.0
    assert seconds[4] == 40.0
