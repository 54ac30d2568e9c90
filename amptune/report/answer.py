"""The answer of a tuning in three lines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amptune.search.table.gains import counted

if TYPE_CHECKING:
    from amptune.search.decide.decision import Decision

__all__ = ["answer_of"]


def answer_of(decision: Decision, output: str, training: str | None = None) -> tuple[str, str, str]:
    """Returns what was found, how sure that is, and what to do next; `training` is the line that training needs."""
    sure = f"{decision.verdict.grounds}, {counted(len(decision.trials), 'trial')}, {decision.seconds:.0f} s"
    found = "; ".join([decision.verdict.sentence, *([] if decision.loader is None else [str(decision.loader)])])
    return found, sure, _next(decision, output, training or f'amptune.apply("{output}", model)')


def _next(decision: Decision, output: str, training: str) -> str:
    written = f"{'provisional policy' if decision.provisional else 'policy'} written to {output}"
    if decision.verdict.is_open:
        return f"{written}; " + (f"run {decision.again}" if decision.again else "give more time with --budget")
    keeps = decision.keeps_the_baseline and decision.loader is None
    if keeps and decision.verdict.confidence == "undecided":
        return f"{written}; run again to search on"
    if keeps:
        return f"{written}; " + (
            "run again to make it surer" if decision.provisional else "nothing to change in training"
        )
    does = "records" if decision.policy.cuda_graphs == "step" else "compiles"
    call = f"; train by tuned.training_step, which it {does}" if decision.policy.needs_call else ""
    return f"{written}. In training: {training}{call}" + (
        "; run again to make it surer" if decision.provisional else ""
    )
