"""Judges every comparison stored under reports/h200 anew: what was said of it then, and what is said of it now?

    python reports/rejudge.py > reports/h200/rejudged.md

Each comparison is judged by its own blocks: a tuning by its rounds, and its trials where they are stored, any other one
by its rounds (`stored.py`, which also says what is assumed where something is not stored).
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stored import Said, Stored, everything, words_of  # beside this program

from amptune.policy.settings import Policy
from amptune.search.table.effects import GPU
from amptune.search.table.ratio import Ratio
from amptune.search.table.verdict import Verdict, departure_count, verdict_of

# Intervals whose widths differ by less than this factor are the same to a reader.
ALIKE = 1.25

# What differs, as the table has it; then the reasons.
LOST, WON, OTHER, WIDER, NARROWER, SAME = "faster → kept", "kept → faster", "another policy", "wider", "narrower", "-"
ORDER = (LOST, WON, OTHER, WIDER, NARROWER, SAME)
SIMPLER = "of policies within 0.5 % of the best, the one with the fewest departures from stock PyTorch wins"
AHEAD = "by all rows another policy is ahead; a figure whose blocks differ much is drawn towards those of the others"
ONE_ROUND = "a single round had no interval; now the priors say how much blocks, processes and sittings differ"
FEW_LAUNCHES = "an interval of one or two launches was doubled; now all rows of all policies say how much blocks differ"
LATER = "most of the interval is what a later sitting adds; then it was about the launches of this one"
NOISE = "blocks or processes differ by more than the medians of the launches had shown"

HEAD = """# Judged anew

`python reports/rejudge.py > reports/h200/rejudged.md` judges every comparison under this folder whose blocks are stored
by the rules of now: one model of all rows, and intervals that hold for a later sitting.

- **then** is what the file says, or, of a file with raw samples alone, the interval as it was computed then. "Proven"
  is an interval above 1 that was not called provisional. Of a baseline that was kept it is the best rival.
- **now** is the ratio of the same policy, and the verdict on the comparison, with another policy if that wins.
- **later** is the ratio measured afterwards in other processes: by `amptune verify`, or in the comparison that followed
  the tuning. A policy beside itself has the ratio 1.
- `trust/` has medians of blocks, not steps. How much the steps of a block differ is unknown there, so that the least
  spread of a GPU stands for it until the rows show more. So it is for the rounds of the tunings in `rivals/`, whose
  trials have steps. Rounds whose launch is not stored count as one launch, blocks without a time as one second.
"""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One comparison and the verdict on it."""

    stored: Stored
    verdict: Verdict

    @property
    def subject(self) -> Policy | None:
        """The policy whose ratios are compared."""
        if self.stored.then.policy is not None:
            return self.stored.then.policy
        return None if self.verdict.leader is None else self.verdict.leader.policy

    @property
    def ratio(self) -> Ratio | None:
        found = None if self.subject is None else self.verdict.contender_of(self.subject)
        return None if found is None else found.vs_baseline

    @property
    def change(self) -> str:
        """What differs, in the words of the table."""
        then, winner = self.stored.then, self.verdict.winner.policy
        if then.faster and self.verdict.keeps_the_baseline:
            return LOST
        if not then.faster and not self.verdict.keeps_the_baseline:
            return WON
        if then.faster and winner != self.subject:
            return OTHER
        return WIDER if self.times_as_wide > ALIKE else NARROWER if self.times_as_wide < 1 / ALIKE else SAME

    @property
    def times_as_wide(self) -> float:
        """The width of the interval now over that of then; 1 if there was no ratio."""
        then, now = self.stored.then.ratio, self.ratio
        return 1.0 if then is None or now is None else now.half_width / then.half_width


def main() -> int:
    judged = [one for stored in everything() if (one := judged_anew(stored)) is not None]
    print(HEAD)
    print(table(judged))
    print("\n".join(["", *summary(judged)]))
    return 0


def judged_anew(stored: Stored) -> Judged | None:
    """Returns None if the baseline was never measured."""

    def bar(policy: Policy) -> str | None:
        return "not as good as FP32" if words_of(policy) in stored.barred else None

    verdict = verdict_of(stored.rows, stored.baseline, GPU, bar=bar)
    return None if verdict is None else Judged(stored=stored, verdict=verdict)


def table(judged: Sequence[Judged]) -> str:
    heads = ("file", "workload", "what", "policy", "then", "now", "later", "differs")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in judged:
        stored = one.stored
        policy = "-" if one.subject is None else words_of(one.subject)
        later = "-" if stored.later is None else f"{stored.later:.3f}"
        cells = (stored.file, stored.workload, stored.name, policy, _then(stored.then), _now(one), later, _change(one))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(one: Judged) -> str:
    times = one.times_as_wide
    width = f" ({times:.1f} times)" if times >= 1 else f" (1/{1 / times:.1f})" if times > 0 else " (none then)"
    return one.change + (width if one.change in (WIDER, NARROWER) else "")


def _then(said: Said) -> str:
    return f"{'' if said.faster else 'kept: '}{_words(said.ratio)}, {said.sure}"


def _now(one: Judged) -> str:
    verdict, winner = one.verdict, one.verdict.winner
    own = f"{'kept: ' if verdict.keeps_the_baseline else ''}{_words(one.ratio)}"
    if verdict.keeps_the_baseline or winner.policy == one.subject:
        return f"{own}, {verdict.confidence}"
    return f"{own}; {words_of(winner.policy)} {_words(winner.vs_baseline)}, {verdict.confidence}"


def _words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "no rival"
    return f"{ratio.value:.3f}×" + ("" if math.isinf(ratio.high) else f" [{ratio.low:.3f}, {ratio.high:.3f}]")


def summary(judged: Sequence[Judged]) -> Iterator[str]:
    """Yields what the table comes to, in lines."""
    yield f"## What differs, and why\n\nOf {len(judged)} comparisons:\n"
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in judged:
        groups[one.change, reason(one)].append(f"{one.stored.file} ({one.stored.name})")
    for (change, why), names in sorted(groups.items(), key=lambda group: (ORDER.index(group[0][0]), -len(group[1]))):
        yield f"- **{change}**, {len(names)}: {why}. {'; '.join(names)}" if why else f"- nothing, {len(names)}"
    yield "\n## Held against what came later\n"
    for name, part in (("tunings measured again", "tuning"), ("policies beside themselves", "itself")):
        later = [one for one in judged if one.stored.later is not None and one.stored.name.startswith(part)]
        now = sum(_holds(one.ratio, one.stored.later) for one in later)
        ratios = [(one.stored.then.ratio, one.stored.later) for one in later]
        known = [(ratio, value) for ratio, value in ratios if ratio is not None and not math.isinf(ratio.high)]
        then = sum(_holds(ratio, value) for ratio, value in known)
        yield f"- {len(later)} {name}: the later ratio lies in {now} of the intervals of now."
        yield f"  {len(known)} had an interval then, and it lies in {then} of those."
        missed = [one.stored.file for one in later if not _holds(one.ratio, one.stored.later)]
        if missed:
            yield f"  Outside of the intervals of now: {'; '.join(missed)}."
    sure = Counter((one.stored.then.sure, one.verdict.confidence) for one in judged if one.stored.then.faster)
    yield "- " + "; ".join(f"{then} then, {now} now: {count}" for (then, now), count in sure.most_common()) + "."


def reason(one: Judged) -> str:
    """Returns why something differs, in a line; "" if nothing does."""
    then, verdict = one.stored.then, one.verdict
    if one.change == SAME:
        return ""
    if one.change == OTHER:
        simpler = one.subject is not None and departure_count(verdict.winner.policy) < departure_count(one.subject)
        return SIMPLER if simpler else AHEAD
    if then.ratio is None or math.isinf(then.ratio.high):
        return ONE_ROUND
    if one.change in (WON, NARROWER):
        return FEW_LAUNCHES
    return LATER if _is_of_later_sittings(one) else NOISE


def _is_of_later_sittings(one: Judged) -> bool:
    """Returns True if most of the interval is what another sitting adds."""
    fit = one.verdict.scores
    if one.subject is None or one.ratio is None:
        return False
    added = fit.next_variance(fit.policies.index(one.subject), fit.baseline)
    return added >= one.ratio.deviation**2 / 2


def _holds(ratio: Ratio | None, value: float | None) -> bool:
    return ratio is not None and value is not None and ratio.low <= value <= ratio.high


if __name__ == "__main__":
    sys.exit(main())
