"""A table of unruly models: is any policy that was written for them slower than stock PyTorch, or does one fail?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreign_table import UNRULY, Evidence, Line, in_words, is_long, mean_ms, name_of, ran  # beside this program

from amptune.policy.serialization import policy_from_dict
from amptune.search.table.ratio import Ratio

# A policy may be this much slower than stock.
SLOWER = 1.02
RECIPES = ("amp bf16", "amp fp16")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one tuning wrote, and the rows of training by it and by stock in the same launches."""

    model: str
    tuning: Line
    own: tuple[Line, ...]
    stock: tuple[Line, ...]

    @property
    def failed(self) -> bool:
        return any(not ran(line) for line in self.own)

    @property
    def speed(self) -> Ratio | None:
        """Returns the speed over stock: of the mean step, with an interval from blocks of the same steps."""
        if self.failed or not self.own or not all(map(ran, self.stock)):
            return None
        stock_of = {line["launch"]: line for line in self.stock}
        pairs = [(stock_of[line["launch"]], line) for line in self.own]
        logs = [math.log(mean_ms(stock) / mean_ms(own)) for stock, own in pairs]
        ratios = [a / b for stock, own in pairs for a, b in zip(stock["ms"], own["ms"], strict=True)]
        blocks = list(map(math.log, ratios))
        deviation = statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
        return Ratio.of_log(statistics.fmean(logs), deviation, freedom=max(1, len(blocks) - 1), launches=len(logs))

    @property
    def name(self) -> str:
        return f"{self.model}, {self.tuning['budget_s']:g} s, {name_of(self.tuning)}"


def is_unruly(evidence: Evidence) -> bool:
    return evidence.model in UNRULY or any(map(is_long, evidence.of("launch")))


def answers_of(evidence: Evidence, budget_s: float) -> list[Answer]:
    lines = evidence.of("launch", budget_s)

    def of(name: str) -> tuple[Line, ...]:
        return tuple(line for line in lines if name in line["names"])

    return [
        Answer(model=evidence.model, tuning=tuning, own=of(name_of(tuning)), stock=of("stock"))
        for tuning in sorted(evidence.of("amptune", budget_s), key=lambda line: line.get("tuning", 0))
    ]


def unruly_table(evidences: Sequence[Evidence]) -> str:
    """Returns the evidence as Markdown: a row for each tuning, then what was asked."""
    answers = [(one, answer) for one in evidences for budget_s in one.budgets_s for answer in answers_of(one, budget_s)]
    if not answers:
        return ""
    heads = ("tuning", "stock", *RECIPES, "amptune", "last block over stock's", "speed over stock", "took", "policy")
    rows = [f"| {' | '.join(_cells(evidence, answer))} |" for evidence, answer in answers]
    verdicts = _verdicts([answer for _, answer in answers])
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, "", *verdicts])


def _cells(evidence: Evidence, answer: Answer) -> Iterator[str]:
    tuning = answer.tuning
    lines = evidence.of("launch", tuning["budget_s"])
    yield answer.name
    for name in ("stock", *RECIPES):
        yield _ms([line for line in lines if name in line["names"]])
    yield _ms(answer.own)
    settled = answer.speed and answer.stock[-1]["ms"][-1] / answer.own[-1]["ms"][-1]
    yield f"{settled:.3f}" if settled else "-"
    yield in_words(answer.speed)
    yield f"{tuning['seconds']:.0f} s"
    yield str(policy_from_dict(tuning["policy"])) if "policy" in tuning else tuning["failure"]


def _ms(lines: Sequence[Line]) -> str:
    failures = [str(line["failure"]) for line in lines if not ran(line)]
    return failures[0] if failures else f"{statistics.fmean(map(mean_ms, lines)):.3f}" if lines else "-"


def _verdicts(answers: Sequence[Answer]) -> Iterator[str]:
    speeds = {answer.name: answer.speed for answer in answers}
    known = {name: speed for name, speed in speeds.items() if speed is not None}
    slower = [f"{name} {in_words(speed)}" for name, speed in known.items() if speed.value < 1 / SLOWER]
    failed = [answer.name for answer in answers if answer.failed]
    without = [answer.name for answer in answers if "policy" not in answer.tuning]
    models = {answer.model for answer in answers}
    yield f"- {len(answers)} tunings of {len(models)} models, of which {len(known)} can be compared"
    yield f"- slower than stock by more than {SLOWER - 1:.0%}: {'; '.join(slower) or 'none'}"
    yield f"- failed in the plain loop: {'; '.join(failed) or 'none'}"
    yield f"- wrote no policy: {'; '.join(without) or 'none'}"
