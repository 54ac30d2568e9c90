"""Prints the results of the commands on stdout: tables if a table reads better, else plain text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

from amptune.policy.settings import Policy
from amptune.report.answer import answer_of, important, ranked
from amptune.search.decide.pareto import MOST_POINTS, ParetoPoint, spread_along
from amptune.search.decide.study_report import StudyReport, command_of, findings_of
from amptune.search.table.gains import FIGURES

if TYPE_CHECKING:
    from amptune.hardware.machine import Cpu, Gpu, Hardware
    from amptune.search.decide.decision import Decision
    from amptune.search.diagnosis import Diagnosis
    from amptune.search.gate.long_look import LongLook
    from amptune.search.table.ablation import Ablated
    from amptune.search.table.objective import Objective
    from amptune.search.table.verdict import Contender
    from amptune.search.verification import Verification

__all__ = [
    "print_decision",
    "print_diagnosis",
    "print_hardware",
    "print_long_look",
    "print_study_report",
    "print_verification",
]

_WIDTH_ELSEWHERE = 150


def print_decision(decision: Decision, output: str, stream: TextIO, *, verbose: bool = False) -> None:
    """Prints the answer in three lines and the important findings; if `verbose`, the tables and all findings too."""
    console = _console_for(stream)
    for line in answer_of(decision, output):
        console.print(line, markup=False)
    shown = ranked(decision.findings) if verbose else important(decision.findings)
    if verbose:
        _print_tables(console, decision)
    for finding in shown:
        console.print(f"• {finding}", markup=False)
    parity = decision.policy_file.evidence.get("parity", {})
    if parity and verbose:
        console.print(f"• {_parity_in_words(parity)}", markup=False)


def _print_tables(console: Console, decision: Decision) -> None:
    console.print()
    console.print(_comparison(decision))
    if decision.ablation:
        console.print(_bought(decision.ablation, decision.objective))


def print_verification(found: Verification, stream: TextIO) -> None:
    """Prints claimed and measured figures side by side, then the findings: the answer and the changes."""
    console = _console_for(stream)
    table = Table(title=f"on {found.hardware.name}, {found.seconds:.0f} s", title_justify="left", box=None)
    table.add_column("")
    for heading in ("claimed", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    now = found.speedup
    table.add_row("policy, ms/step", _ms(found.claim.step_ms), _ms(found.policy.step_ms))
    table.add_row("baseline, ms/step", _ms(found.claim.baseline_ms), _ms(found.baseline.step_ms))
    table.add_row("speed-up", f"{found.claim.speedup:.3f}×", "failed" if now is None else str(now))
    console.print(table)
    for finding in found.findings:
        console.print(f"• {finding}", markup=False)


def print_long_look(look: LongLook, curves: str, stream: TextIO) -> None:
    """Prints the last losses of FP32 and the policy side by side, then the findings: the answer comes first."""
    console = _console_for(stream)
    table = Table(title=f"{look.name} on {look.hardware.name}, {look.seconds:.0f} s", title_justify="left", box=None)
    table.add_column("")
    for heading in ("FP32", "between seeds", "policy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gap in look.shown:
        table.add_row(gap.what, f"{gap.fp32:.4g}", f"±{gap.spread:.2g}", f"{gap.policy:.4g}")
    if look.gaps:
        console.print(table)
    for finding in look.findings:
        console.print(f"• {finding}", markup=False)
    console.print(f"the curves are in {curves}", markup=False)


def print_diagnosis(found: Diagnosis, stream: TextIO) -> None:
    """Prints one finding per line, the most important first."""
    console = _console_for(stream)
    console.print(f"{found.subject.name} on {found.hardware.name}, {found.seconds:.0f} s", style="bold", markup=False)
    for finding in found.findings:
        console.print(f"• {finding}", markup=False)
    if not found.findings:
        console.print("nothing was found to be wrong")


def print_hardware(hardware: Hardware, stream: TextIO) -> None:
    """Prints the machine, one fact per line."""
    console = _console_for(stream)
    facts = _gpu_facts(hardware.gpu) if hardware.gpu else {}
    facts |= _cpu_facts(hardware.cpu)
    software = hardware.software
    facts["software"] = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("torch", software.torch),
            ("Python", software.python),
            ("CUDA", software.cuda),
            ("cuDNN", software.cudnn),
            ("driver", software.driver),
        )
        if version
    )
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        console.print(f"{name:<{width}}{fact}", markup=False)
    console.print("labels", markup=False)
    for name, value in hardware.labels:
        console.print(f"  {name}: {value}", markup=False)
    for reading in hardware.unread:
        console.print(f"not read: {reading}", markup=False)


def _comparison(decision: Decision) -> Table:
    table = Table(title=f"{decision.subject.name} on {decision.hardware.name}", title_justify="left", box=None)
    shown = _shown(decision)
    energy = any(contender.energy_j_per_sample is not None for contender in shown)
    objective = decision.objective.name
    own = () if objective == "throughput" else (f"{objective} vs. baseline",)
    headings = (
        "",
        "ms/step",
        "95 %",
        "samples/s",
        "peak MiB",
        *(("J/sample",) if energy else ()),
        "vs. baseline",
        *own,
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("policy")
    for contender in shown:
        cells = _row(contender, _role(contender, decision), energy=energy, used=bool(own))
        table.add_row(*cells, *("" for _ in range(len(headings) - len(cells))), str(contender.policy))
    return table


def _shown(decision: Decision) -> list[Contender]:
    """Returns the finalists; winner and baseline have the figures of the comparison that supports the claim."""
    claimed = {decision.verdict.winner.policy: decision.verdict.winner, decision.baseline.policy: decision.baseline}
    others = [contender for contender in decision.finalists if contender.policy not in claimed]
    return sorted([*claimed.values(), *others], key=lambda contender: contender.place)


def _bought(ablation: Sequence[Ablated], objective: Objective) -> Table:
    """Returns each setting's effect on speed; for memory or energy, on the use of it, with the speed beside it."""
    plain = objective.name == "throughput"
    table = Table(title="\nwhat each setting buys", title_justify="left", box=None)
    headings = ("setting", "value", f"{FIGURES[objective.name]} with it / without", "95 %", "speed")
    for heading in headings[: -1 if plain else None]:
        table.add_column(heading, no_wrap=True)
    for one in ablation:
        value = "" if isinstance(one.variant.value, list) else str(one.variant.value)
        buys = one.buys if plain else one.buys.inverse
        interval = "" if math.isinf(one.buys.high) else f"{buys.low:.3f}-{buys.high:.3f}"
        speed = () if plain else (f"{one.speed.value:.3f}×",)
        table.add_row(one.variant.setting, value, f"{buys.value:.3f}×", interval, *speed)
    return table


def _role(contender: Contender, decision: Decision) -> str:
    roles = []
    if contender is decision.verdict.winner:
        roles.append("winner")
    if contender.policy == decision.baseline.policy:
        roles.append("baseline")
    elif decision.amp_recipe is not None and contender.policy == decision.amp_recipe.policy:
        roles.append("AMP recipe")
    return ", ".join(roles)


def _row(contender: Contender, role: str, *, energy: bool, used: bool) -> tuple[str, ...]:
    """Returns the cells before the policy's own cell; fewer if the policy failed."""
    if contender.failure is not None or contender.step_ms is None:
        return (role, str(contender.failure and contender.failure.kind))
    interval = contender.step_ms_ci95
    ratio, joules = contender.vs_baseline, contender.energy_j_per_sample
    slow = " too slow" if contender.too_slow else ""
    return (
        role,
        f"{contender.step_ms:.3f}",
        "" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}",
        f"{contender.samples_per_s:,.1f}",
        f"{contender.peak_memory_mib:,.0f}",
        *((("" if joules is None else f"{joules:.4g}"),) if energy else ()),
        "" if ratio is None else f"{ratio.value:.2f}×{slow}",
        *((f"{1 / contender.merit:.2f}×" if contender.merit else "",) if used else ()),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _parity_in_words(parity: dict[str, float] | object) -> str:
    """Each figure is optional: losses need equal batches, the gate's share needs a policy it has judged."""
    assert isinstance(parity, dict)  # noqa: S101  # evidence that this process made
    words = []
    if "loss_deviation" in parity:
        words.append(f"losses of the first steps within {parity['loss_deviation']:.2g} of the baseline's (relative)")
    if "fp32_loss_deviation" in parity:
        words.append(f"the baseline's own runs differ by {parity['fp32_loss_deviation']:.2g}")
    if "share_of_allowed" in parity:
        words.append(f"of what the numerics gate allows, {parity['share_of_allowed']:.0%} is used")
    return "; ".join(words)


def _gpu_facts(gpu: Gpu) -> dict[str, str]:
    can = [name for name in ("tensor_cores", "bf16", "tf32", "fp8") if getattr(gpu, name)]
    cannot = [name for name in ("tensor_cores", "bf16", "tf32", "fp8") if not getattr(gpu, name)]
    major, minor = gpu.compute_capability
    others = gpu.other_processes
    facts = {
        "gpu": f"{gpu.name} (cuda:{gpu.index}, {gpu.uuid})",
        "generation": f"{gpu.generation}, compute capability {major}.{minor}, {gpu.multiprocessors} multiprocessors",
        "memory": _or_unknown(gpu.memory_mib, "MiB"),
        "has": ", ".join(can).replace("_", " ") or "none of tensor cores, bf16, tf32, fp8",
        "has not": ", ".join(cannot).replace("_", " "),
        "power limit": _or_unknown(gpu.power_limit_w, "W"),
        "sm clock": f"{_or_unknown(gpu.sm_clock_mhz, 'MHz')} of {_or_unknown(gpu.sm_clock_max_mhz, 'MHz')}",
        "mig": "unknown" if gpu.mig is None else "on" if gpu.mig else "off",
        "others on it": "unknown" if others is None else ", ".join(map(str, others)) or "no process",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _cpu_facts(cpu: Cpu) -> dict[str, str]:
    extensions = [name for name, has in (("AVX-512-BF16", cpu.avx512_bf16), ("AMX-BF16", cpu.amx_bf16)) if has]
    return {
        "cpu": f"{cpu.model} ({cpu.architecture}), {cpu.cores} cores"
        + (f", {', '.join(extensions)}" if extensions else ", no bf16 instructions"),
        "cpu memory": _or_unknown(cpu.memory_mib, "MiB"),
    }


def _or_unknown(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}"


def _console_for(stream: TextIO) -> Console:
    """Returns a console; if not a terminal, it is wide enough that tables are not cut at a default width."""
    width = None if stream.isatty() else _WIDTH_ELSEWHERE
    return Console(file=stream, highlight=False, width=width)


def print_study_report(study_report: StudyReport, stream: TextIO) -> None:
    """Prints the answer, the Pareto set, the number of failures, and the command that proves the answer."""
    console, record = _console_for(stream), study_report.record
    last = record.last
    console.print(f"{last.workload} on {last.hardware}, for {study_report.objective.name}", style="bold", markup=False)
    for finding in findings_of(study_report):
        console.print(f"• {finding}", markup=False)
    console.print(_front(study_report))
    failures = Counter(failure.kind for _, failure in study_report.failures)
    if failures:
        words = ", ".join(f"{count} {kind}" for kind, count in failures.items())
        console.print(f"\n{len(study_report.failures)} of {len(record.trials)} trials failed: {words}", markup=False)
    console.print(f"\nTo measure it anew: {command_of(study_report)}", markup=False)


def _front(study_report: StudyReport) -> Table:
    """Returns the Pareto set as a table, with each policy's role."""
    shown = spread_along(study_report.front)
    energy = any(point.energy_j_per_sample is not None for point in shown)
    more = "" if len(shown) == len(study_report.front) else f" ({MOST_POINTS} of {len(study_report.front)})"
    title = f"\nwhat no policy beats in everything{more}, beside the baseline"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("", "samples/s", "peak MiB", *(("J/sample",) if energy else ()), "numerics"):
        table.add_column(heading, justify="right" if heading and heading != "numerics" else "left", no_wrap=True)
    table.add_column("policy")
    for point in _with_the_named(study_report, shown):
        table.add_row(*_study_row(study_report, point, energy=energy))
    return table


def _with_the_named(study_report: StudyReport, shown: Sequence[ParetoPoint]) -> Iterator[ParetoPoint]:
    """Yields the points, fastest first, plus winner and baseline, which need not be in the Pareto set."""
    named = {study_report.policy, study_report.baseline.policy}
    others = [point for point in study_report.points if point.policy in named and point not in shown]
    yield from sorted([*shown, *others], key=lambda point: -point.samples_per_s)


def _study_row(study_report: StudyReport, point: ParetoPoint, *, energy: bool) -> tuple[str, ...]:
    joules = point.energy_j_per_sample
    return (
        role_of(study_report, point.policy),
        f"{point.samples_per_s:,.1f}",
        f"{point.peak_memory_mib:,.0f}",
        *((("" if joules is None else f"{joules:.4g}"),) if energy else ()),
        "passed" if point.judged else "not judged",
        str(point.policy),
    )


def role_of(study_report: StudyReport, policy: Policy) -> str:
    """Returns a policy's role in an answer, or an empty string."""
    roles = {study_report.policy: "answer", study_report.baseline.policy: "baseline"}
    return "answer: baseline" if study_report.keeps_the_baseline and policy in roles else roles.get(policy, "")
