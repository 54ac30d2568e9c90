"""The one file of the harness, and of the simulated machines, that names inner modules of amptune.

Whoever moves a module mends its line here, and nothing else of the harness changes. On the starting commit the harness
runs with the adapter that stands there, so what decides a replay uses no name that this file did not have then.
"""

import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest import mock

from amptune.cli.entry import cli
from amptune.cli.session import Session
from amptune.errors import AmptuneError
from amptune.hardware.machine import Cpu, Gpu, Hardware, Software
from amptune.measure.results.half_effects import Half, ModuleTrace, Reach, Sensitivity
from amptune.measure.results.loop_timing import LoopTiming
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Leaf, Module, Prepared, Subject
from amptune.measure.results.training_runs import LossCurve, Parity
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.events import ComparisonStarted, Event
from amptune.search.narrowing import Narrowing
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.exclusions import groups_by_intensity
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.space.knobs import points
from amptune.search.table.effects import GPU
from amptune.search.table.objective import objective_of
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = [
    "GPU",
    "STOCK",
    "AmptuneError",
    "Budget",
    "Candidates",
    "ComparisonStarted",
    "Cpu",
    "Decision",
    "Effort",
    "Event",
    "Failure",
    "Fp32Rule",
    "GlobalBatch",
    "Gpu",
    "Half",
    "Hardware",
    "Leaf",
    "LoopTiming",
    "LossCurve",
    "Measurement",
    "Module",
    "ModuleTrace",
    "Narrowing",
    "Outcome",
    "Parity",
    "Policy",
    "Prepared",
    "Ran",
    "Ratio",
    "Reach",
    "Row",
    "Sensitivity",
    "Software",
    "Source",
    "StepProfile",
    "Subject",
    "TuningRequest",
    "Verdict",
    "Wanted",
    "amp_recipe",
    "candidates_for",
    "command",
    "groups_by_intensity",
    "objective_of",
    "points",
    "tune_with",
    "verdict_of",
]


@dataclass(frozen=True)
class Ran:
    """What a command line gave."""

    exit_code: int
    stdout: str
    stderr: str


def command(*arguments: str, evaluator: Any = None, clock: Callable[[], float] = time.monotonic) -> Ran:
    """Runs `amptune` with these arguments in this process; an `evaluator` stands for the machine, by its own clock."""
    stdout, stderr, code = StringIO(), StringIO(), None
    session = Session(started=clock(), clock=clock, evaluator=evaluator)
    with (
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        mock.patch("amptune.measure.workers.processes.start_importing"),
    ):
        try:
            cli.main(arguments, prog_name="amptune", obj=session)
        except SystemExit as ended:
            code = ended.code
    return Ran(code if isinstance(code, int) else 0, stdout.getvalue(), stderr.getvalue())
