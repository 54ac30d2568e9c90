"""What is believed of policies that were not measured."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from amptune.search.sampler.acquisition import Proposer, Seen, features_of, with_features
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


BEST = max(range(len(POINTS)), key=lambda index: log_speed(POINTS[index]))


def test_what_was_not_measured_is_told_from_what_its_settings_brought_elsewhere() -> None:
    rng = np.random.default_rng(0)
    seen = {int(i): log_speed(POINTS[i]) for i in rng.choice(len(POINTS), 40, replace=False)}
    belief = Surrogate(KNOBS, POINTS).belief(seen)
    truth = np.array([log_speed(point) for point in POINTS])
    unseen = [i for i in range(len(POINTS)) if i not in seen]
    assert np.abs(belief.mean - truth)[unseen].max() < 0.1
    assert np.corrcoef(belief.mean[unseen], truth[unseen])[0, 1] > 0.98


def test_an_outlier_among_the_measurements_does_not_count_for_much() -> None:
    rng = np.random.default_rng(1)
    seen = {int(i): log_speed(POINTS[i]) for i in rng.choice(len(POINTS), 60, replace=False)}
    hit = next(iter(seen))
    belief = Surrogate(KNOBS, POINTS).belief({**seen, hit: seen[hit] - 0.5})
    unseen = [i for i in range(len(POINTS)) if i not in seen]
    assert np.abs(belief.mean - [log_speed(point) for point in POINTS])[unseen].mean() < 0.05
    assert belief.mean[hit] > seen[hit] - 0.4


def test_one_that_saw_the_trials_come_believes_what_one_does_that_sees_them_at_once() -> None:
    """So that any process goes on as the one before would have."""
    rng = np.random.default_rng(3)
    order = [int(i) for i in rng.choice(len(POINTS), 30, replace=False)]
    kept = Surrogate(KNOBS, POINTS)
    for count in range(2, len(order)):
        seen = {i: log_speed(POINTS[i]) for i in order[:count]}
        found, fresh = kept.belief(seen), Surrogate(KNOBS, POINTS).belief(seen)
        assert found.mean == pytest.approx(fresh.mean)
        assert found.deviation == pytest.approx(fresh.deviation)


def test_what_runs_elsewhere_is_believed_to_turn_out_as_expected_and_is_not_proposed() -> None:
    seen = {i: Seen(score=math.exp(log_speed(POINTS[i])), seconds=1.0) for i in range(0, len(POINTS), 7)}
    running: list[int] = []
    for _ in range(6):
        proposal = Proposer(KNOBS, POINTS, seed=0).next(seen, running=running)
        assert proposal is not None
        assert proposal.index not in {*seen, *running}
        running.append(proposal.index)


def test_less_than_was_expected_by_far_is_a_surprise() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    seen = {i: Seen(score=math.exp(log_speed(POINTS[i])), seconds=1.0) for i in range(0, len(POINTS), 3)}
    proposal = proposer.next(seen)
    assert proposal is not None
    true = math.exp(log_speed(POINTS[proposal.index]))
    assert 0.6 * true < proposal.least < 0.97 * true


def test_the_best_of_a_space_is_found_in_a_fraction_of_it() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    rng = np.random.default_rng(2)
    seen: dict[int, Seen] = {}
    for index in (0, 30, 60, 90, 120):
        seen[index] = Seen(score=math.exp(log_speed(POINTS[index])), seconds=1.0)
    while BEST not in seen:
        proposal = proposer.next(seen)
        assert proposal is not None
        speed = math.exp(log_speed(POINTS[proposal.index]) + rng.normal(0, 0.01))
        seen[proposal.index] = Seen(score=speed, seconds=1.0)
    assert len(seen) <= 30 < len(POINTS) / 4


def test_what_fails_is_kept_away_from() -> None:
    every_fourth = range(0, len(POINTS), 4)
    proposer = Proposer(KNOBS, POINTS, seed=0)
    speeds = {i: None if POINTS[i]["autocast"] == "fp16" else math.exp(log_speed(POINTS[i])) for i in every_fourth}
    seen = {index: Seen(score=speed, seconds=1.0) for index, speed in speeds.items()}
    proposal = proposer.next(seen)
    assert proposal is not None
    assert POINTS[proposal.index]["autocast"] == "bf16"


def test_of_two_as_promising_the_cheaper_is_tried() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    seen = {
        index: Seen(score=math.exp(log_speed(POINTS[index])), seconds=20.0 if POINTS[index]["cudnn_benchmark"] else 1.0)
        for index in range(0, len(POINTS), 5)
    }
    proposal = proposer.next(seen)
    assert proposal is not None
    assert POINTS[proposal.index]["cudnn_benchmark"] is False


def test_nothing_that_was_seen_or_is_left_out_is_proposed() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    seen = {0: Seen(score=1.0, seconds=1.0), 1: Seen(score=1.1, seconds=1.0)}
    wanted = {"autocast": "bf16", "cudnn_benchmark": False}
    out = [index for index, point in enumerate(POINTS) if any(point[name] != value for name, value in wanted.items())]
    while proposal := proposer.next(seen, out):
        assert proposal.index not in {*seen, *out}
        seen[proposal.index] = Seen(score=1.0, seconds=1.0)
    assert len(seen) == 2 + 2 * 2 * 6


def test_the_expected_gain_falls_as_the_best_becomes_known() -> None:
    proposer = Proposer(KNOBS, POINTS, seed=0)
    few = {i: Seen(score=math.exp(log_speed(POINTS[i])), seconds=1.0) for i in range(0, len(POINTS), 12)}
    many = {i: Seen(score=math.exp(log_speed(POINTS[i])), seconds=1.0) for i in {BEST, *range(0, len(POINTS), 2)}}
    first, second = proposer.next(few), Proposer(KNOBS, POINTS, seed=0).next(many)
    assert first is not None
    assert second is not None
    assert second.gain < first.gain


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
