"""The one file of the harness, and of the simulated machines, that names inner modules of amptune.

Whoever moves a module mends its line here, and nothing else of the harness changes. `python -m frozen --tree DIR` runs
the harness on another checkout with the adapter of that checkout.
"""

from amptune.hardware.machine import Cpu, Gpu, Hardware, Software
from amptune.measure.loop_timing import LoopTiming
from amptune.measure.numerics import Parity
from amptune.measure.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.sensitivity import Half, Sensitivity
from amptune.measure.speed_profile import StepProfile
from amptune.measure.subject import Leaf, Prepared, Subject
from amptune.measure.trace import ModuleTrace
from amptune.measure.worker import Source
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.search.budget import Budget
from amptune.search.candidates import Candidates, Wanted, candidates_for
from amptune.search.deciding import Decision
from amptune.search.events import ComparisonStarted, Event
from amptune.search.exclusions import groups_by_intensity
from amptune.search.finals import Comparison
from amptune.search.ratios import Ratio, ratio_between
from amptune.search.request import TuningRequest
from amptune.search.space import points
from amptune.search.tuning import tune_with

__all__ = [
    "STOCK",
    "Budget",
    "Candidates",
    "Comparison",
    "ComparisonStarted",
    "Cpu",
    "Decision",
    "Effort",
    "Event",
    "Failure",
    "Fp32Rule",
    "Gpu",
    "Half",
    "Hardware",
    "Leaf",
    "LoopTiming",
    "Measurement",
    "ModuleTrace",
    "Outcome",
    "Parity",
    "Policy",
    "Prepared",
    "Ratio",
    "Sensitivity",
    "Software",
    "Source",
    "StepProfile",
    "Subject",
    "TuningRequest",
    "Wanted",
    "candidates_for",
    "groups_by_intensity",
    "points",
    "ratio_between",
    "tune_with",
]
