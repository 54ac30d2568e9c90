"""A terminal of a given width, to print on; and decisions to print."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from simulated.clock import SimulatedClock
from simulated.recorded import RecordedEvaluator

from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Fp32Rule
from amptune.search.decide.decision import Decision
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.space.candidates import Wanted
from amptune.search.table.contenders import Contender
from amptune.search.table.objective import THROUGHPUT, Objective

__all__ = ["BERT_RULES", "Terminal", "decision_of", "with_rules"]

BERT_RULES = (
    *(Fp32Rule(path=f"bert.encoder.layer.{layer}.attention.output.LayerNorm") for layer in (0, 3, 7, 11)),
    Fp32Rule(type="Embedding"),
)


class Terminal(io.StringIO):
    """What a terminal of `width` columns is sent, without colours if `TERM` is dumb."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int, term: str = "dumb") -> None:
        super().__init__()
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", "24")

    def isatty(self) -> bool:
        return True


def decision_of(folder: Path, objective: Objective = THROUGHPUT) -> Decision:
    """The decision of a tuning on a recorded H200, whose host reports energy."""
    clock = SimulatedClock()
    evaluator = RecordedEvaluator(workload="resnet50", noise=0.002, clock=clock, watts=lambda _: 400.0)
    request = TuningRequest(
        source=Source(target="train.py:small"),
        wanted=Wanted(baseline=STOCK, pins={}),
        budget=Budget(seconds=120, trials=4, started=clock(), clock=clock),
        folder=folder,
        study=folder,
        objective=objective,
    )
    return tune_with(evaluator, request, lambda _: None)


def with_rules(decision: Decision) -> Decision:
    """The same decision, of policies that keep modules of a BERT in FP32, the baseline aside."""
    verdict, first = decision.verdict, decision.baseline.policy

    def told(contender: Contender) -> Contender:
        if contender.policy == first:
            return contender
        return replace(contender, policy=replace(contender.policy, fp32_modules=BERT_RULES))

    contenders = {contender: told(contender) for contender in verdict.contenders}
    recipes = tuple(replace(policy, fp32_modules=BERT_RULES) for policy in decision.recipes)
    changed = replace(verdict, contenders=tuple(contenders.values()), winner=contenders[verdict.winner])
    ruled = replace(decision, verdict=changed, recipes=recipes)
    ruled.__dict__["ablation"] = decision.ablation  # the table knows these policies without their rules
    return ruled
