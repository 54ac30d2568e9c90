"""The program that trains hard cases with recorded CUDA graphs: its verdicts, and what one case leaves to the next."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

import graph_cases
import graph_trial
from graph_models import CASES
from graph_models.case import Case, Net, Training, plain_step
from graph_trial import BY_ITSELF, CRASHED, ENDED, HUNG, NOISY, PLAIN_FAILS, RAISED, SAME, WRONG, Outcome

from amptune.policy.findings import Finding

CPU = torch.device("cpu")


def case(step: Callable[[Training], torch.Tensor]) -> Case:
    return Case(name="a", group="b", model=Net, step=step, steps=4)


def is_graphed(training: Training) -> bool:
    return training.called is not training.model


def verdict_on(step: Callable[[Training], torch.Tensor]) -> str:
    verdict: str = graph_trial.row_of(case(step), CPU, lambda: None)["verdict"]
    return verdict


def differs(training: Training) -> torch.Tensor:
    return plain_step(training) + is_graphed(training)


def raises(training: Training) -> torch.Tensor:
    if is_graphed(training):
        raise ValueError("no")
    return plain_step(training)


def raises_plainly(_: Training) -> torch.Tensor:
    raise ValueError("no")


def test_training_by_a_recording_is_held_against_plain_training() -> None:
    calls: list[float] = []

    def never_twice_the_same(training: Training) -> torch.Tensor:
        calls.append(1.0)
        return plain_step(training) + len(calls)

    assert verdict_on(plain_step) == SAME
    assert verdict_on(differs) == WRONG
    assert verdict_on(raises) == RAISED
    assert verdict_on(raises_plainly) == PLAIN_FAILS
    assert verdict_on(never_twice_the_same) == NOISY


def outcome(*values: float, said_at: int | None = None, made: int = 1) -> Outcome:
    said = Finding(code="c", message="m")
    tensors = [torch.tensor(one, dtype=torch.float64) for one in values]
    return Outcome(
        values=tensors,
        weights=[[one] for one in tensors],
        buffers=[[] for _ in tensors],
        findings=[] if said_at is None else [(said_at, said)],
        made=made,
    )


@pytest.mark.parametrize(
    ("graphed", "verdict"),
    [
        (outcome(1, 2, 3), SAME),
        (outcome(1, 2, 3, made=0), BY_ITSELF),
        (outcome(1, 2, 3, said_at=1), BY_ITSELF),
        (outcome(1, 2, 4), WRONG),
        (outcome(1, 2, 4, said_at=2), ENDED),
        (outcome(1, 2, 4, said_at=1), WRONG),
        (outcome(1, 2, float("nan")), WRONG),
        (replace(outcome(1), error="ValueError: no", failed_at=1), RAISED),
    ],
)
def test_a_difference_is_wrong_if_nothing_was_said_after_it_began(graphed: Outcome, verdict: str) -> None:
    assert graph_trial.judged(outcome(1, 2, 3), graphed, 1e-3)[0] == verdict


def test_values_that_are_not_finite_are_to_be_the_same() -> None:
    plain = outcome(1, float("nan"), float("inf"))
    assert graph_trial.judged(plain, outcome(1, float("nan"), float("inf")), 1e-3)[0] == SAME
    assert graph_trial.judged(plain, outcome(1, float("nan"), float("-inf")), 1e-3)[0] == WRONG


@pytest.mark.parametrize(
    "name", ["default_dtype_changed", "deterministic_turned_on", "anomalies_detected", "global_hook_comes_and_goes"]
)
def test_what_a_case_changes_in_the_process_is_put_back(name: str) -> None:
    graph_trial.trained(replace(CASES[name], steps=14), CPU, graphs=False)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert not torch.nn.modules.module._global_forward_hooks


def test_cases_that_import_slowly_share_a_process() -> None:
    lots = graph_cases.lots_of(list(CASES.values()))
    assert {CASES[name].package for name in lots[0]} == {"transformers"}
    assert all(len(lot) == 1 and not CASES[lot[0]].package for lot in lots[1:])


def test_the_summary_counts_by_class_and_names_what_is_bad() -> None:
    rows = [{"name": name, "class": "waits", "verdict": one} for name, one in (("a", SAME), ("b", WRONG), ("c", HUNG))]
    assert graph_cases.summary(rows).splitlines()[1:] == [
        "class  cases  same (recorded)  wrong  hung",
        "waits  3      1                1      1   ",
        "all    3      1                1      1   ",
        "wrong: b",
        "hung: c",
    ]


def serve(connection: Connection[Any, Any], _: str) -> None:
    """Hangs or ends if it is asked to."""
    connection.send(graph_cases.READY)
    while True:
        name = connection.recv()
        connection.send(graph_cases.PLAIN_IS_OVER)
        if name == "lstm":
            os.abort()
        if name == "gru":
            time.sleep(60)
        connection.send({"name": name, "verdict": SAME, "leaves_device_broken": False})


@pytest.mark.slow
def test_a_case_that_hangs_or_ends_its_process_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cases, "serve", serve)
    lots: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    lots.put(["spectral_norm", "lstm", "gru", "weight_norm"])
    rows: list[Any] = []
    graph_cases.Lane("cpu", 2.0, lots, rows.append).work()
    assert rows.pop() is None
    assert [row["verdict"] for row in rows] == [SAME, CRASHED, HUNG, SAME]
