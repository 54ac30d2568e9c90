"""The decision of a tuning run: what it concludes, and the policy file that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amptune.hardware.machine import Hardware
from amptune.measure.bench.readings import noticed
from amptune.measure.results.loop_timing import LoaderGain, LoaderTrial, loader_gain
from amptune.measure.results.subject import Prepared, Subject
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.search.decide.caveats import numeric_caveats, of_the_loader
from amptune.search.decide.compile_findings import compile_findings
from amptune.search.decide.conclusion import Conclusion
from amptune.search.decide.evidence import evidence_of, labels_of, parity_of
from amptune.search.table.row import Row

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, kw_only=True)
class Decision(Conclusion):
    """The result of a tuning.

    It is `provisional` if the gain is likely and not confirmed, the policy's numerics were not judged, or the run was
    interrupted. `again` is the command to run next if there is no answer yet. `memory_mib` is the memory that the
    device had available. `timeline` says what was done when, and why. `artifacts` is the file of what torch.compile
    made of the winner, in the study's folder: `amptune.apply` takes it. `loader` is what other settings of the user's
    DataLoader gain, if that was measured.
    """

    policy_file: PolicyFile
    findings: tuple[Finding, ...]
    hardware: Hardware
    subject: Subject
    seconds: float
    provisional: bool
    again: str | None = None
    memory_mib: float | None = None
    timeline: tuple[Mapping[str, Any], ...] = ()
    artifacts: Path | None = None
    loader: LoaderGain | None = None

    @property
    def policy(self) -> Policy:
        """The answer, as the policy file has it."""
        return self.policy_file.policy


def decide(
    found: Conclusion,
    prepared: Prepared,
    rows: Sequence[Row],
    *,
    findings: Sequence[Finding] = (),
    seconds: float,
    interrupted: bool = False,
    timeline: Sequence[Mapping[str, Any]] = (),
    again: str | None = None,
    loaders: Sequence[LoaderTrial] = (),
) -> Decision:
    """Returns the decision that a conclusion from all `rows` leads to.

    `findings` are what the run noticed, `seconds` what it took, `loaders` the settings of the loader that it
    tried. If nothing but the baseline was measured, `again` is the command with a budget that is enough for a first
    comparison.
    """
    parity = parity_of(rows, found.winner, found.baseline.policy)
    caveats = tuple(numeric_caveats(found, parity, findings))
    is_unjudged = any(finding.code == "not-judged" for finding in caveats)
    is_unsure = found.verdict.confidence == "likely" and not found.keeps_the_baseline
    provisional = interrupted or is_unsure or is_unjudged
    again = again if found.verdict.is_open else None
    loader = loader_gain(loaders)
    told = (
        *found.verdict.findings,
        *_without_answer(found, again),
        *prepared.noticed,
        *findings,
        *of_the_loader(rows, found.verdict, loaders),
        *compile_findings(found.trials, found.winner),
        *caveats,
        *noticed(row.outcome for row in rows),
    )
    return Decision(
        verdict=found.verdict,
        trials=found.trials,
        judgements=found.judgements,
        recipes=found.recipes,
        policy_file=PolicyFile(
            policy=replace(
                found.winner,
                batch_size=found.winner.batch_size or prepared.subject.batch_size,
                loader=found.winner.loader if loader is None else loader.settings,
            ),
            name=prepared.subject.name,
            valid_for=labels_of(prepared),
            evidence=evidence_of(found, rows, parity, told, seconds=seconds, provisional=provisional),
        ),
        findings=told,
        hardware=prepared.hardware,
        subject=prepared.subject,
        seconds=seconds,
        provisional=provisional,
        again=again,
        memory_mib=prepared.memory_mib,
        timeline=tuple(timeline),
        loader=loader,
    )


def _without_answer(found: Conclusion, again: str | None) -> Iterator[Finding]:
    """Yields that nothing but the baseline was measured, and what to run."""
    if found.verdict.is_open:
        message = found.verdict.sentence + (f"; run {again}" if again else "; give more time with --budget")
        yield Finding(code="budget-too-small", message=message)
