"""The page's last section: findings by importance, with what to do; and all that it takes to repeat the study. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from amptune.policy.findings import Finding
from amptune.report.important_findings import ranked
from amptune.report.markup import code, memory, note, prose, section, table
from amptune.search.decide.study_report import StudyReport, command_of, tuning_command
from amptune.search.sampler.records import StudyRecord

__all__ = ["findings_section_of", "repeated"]

# What to do about a finding whose message does not say it.
_ADVICE = {
    "own-load": "Nothing: training runs in this state too. A higher power limit makes both faster.",
    "throttled": "Look at the GPU's cooling and power; measure again when it runs at full clocks.",
    "foreign-process": "Tune on a GPU that nothing else uses.",
    "host-load": "Tune while the host is idle, or give the job more CPU cores.",
    "beside-compiling": "Give more with --budget: then more blocks are measured when nothing compiles.",
    "allocator-thrashing": "Use a smaller batch; memory is short.",
    "unsteady": "Give more with --budget, or tune on a quieter machine.",
    "input-bound": "Make the loader faster: more workers, pinned memory, decoding on the GPU. No policy helps there.",
    "not-judged": "Run the same command again, or `amptune verify policy.yaml TARGET --numerics`.",
    "graph-not-judged": "Run the same command again, or `amptune verify policy.yaml TARGET --numerics`.",
    "shared-cpu": "Measure the policy again with all cores: `amptune verify policy.yaml TARGET`.",
    "graph-breaks": "Move what breaks the graph out of the model's forward, or keep compile off.",
    "recompiles": "Pad batches to a fixed size.",
    "launch-bound": "CUDA graphs or torch.compile: the host is too slow for this GPU.",
    "interrupted": "Run the same command again: it continues.",
}  # fmt: skip


def findings_section_of(study_report: StudyReport, findings: Iterable[Finding]) -> str:
    items = "\n".join(map(_item, ranked(findings))) or "<li>Nothing was noticed.</li>"
    again = repeated(study_report.record, command_of(study_report))
    return section("findings", "Findings", f'<ul class="findings">{items}</ul>', *again)


def _item(finding: Finding) -> str:
    advice = _ADVICE.get(finding.code)
    do = f'<span class="do">{prose(advice)}</span>' if advice else ""
    return f"<li>{prose(str(finding))}{do}</li>"


def repeated(record: StudyRecord, command: str) -> Iterator[str]:
    """Yields hardware, versions, where the raw samples lie, and the commands to repeat the study."""
    last = record.last
    facts = [("hardware", last.hardware)]
    facts += [("memory that was free", memory(last.memory_mib))] if last.memory_mib is not None else []
    facts += list(last.software) or [("versions", "not kept: an earlier amptune made this study")]
    facts += [("workload", f"{last.workload} ({last.target or 'from Python'}), batch size {last.batch_size}")]
    facts += [("baseline", str(last.baseline)), ("study", record.name), ("raw samples", record.where)]
    yield "<h3>Where this comes from</h3>"
    yield table(["", ""], facts)
    yield note("To measure more in the same study:")
    yield code(command)
    yield note("To tune from the start:")
    yield code(tuning_command(record.last))
