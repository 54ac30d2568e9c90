"""Holds the numerics gate, the diagnosis and the cure against models of which it is known what is wrong with them.

    python reports/numerics.py --faults --out reports/numerics/cpu
    python reports/numerics.py --faults --packages 2 --zoo --out reports/numerics/h200

`--faults`: each model of `faults.py` and `hard_faults.py` in `tests/numerics`, under autocast in bf16 and fp16. Is it
rejected where its fault shows and passed where it does not? Is the planted module, or one that holds it, named first,
and what does the cure hold besides it?
`--packages N`: each of the forty models of `package_models.py`, N times with other seeds: how many runs are rejected?
On a CPU, pictures in bf16 only.
`--others N`, `--later N`: the same of two times thirty others there.
`--full-size N`: the same of those there that are as large as in use.
`--zoo`: the bundled workloads, in bf16, fp16, bf16 with channels_last, and TF32.
Writes OUT.json, one row a judgement, as each is done. `--part 2/5`: the second of five parts of all models, for one of
five processes; `--summary OUT.json …` prints what stands in the files of all of them, and with `--out` joins them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# The models are made for the tests and live among them; they are no part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "numerics"))

from faults import FAULTS, Fault  # found by the line above
from hard_faults import HARD_FAULTS

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.numerics.traces import trace_step
from amptune.measure.results.half_effects import ModuleTrace
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity, Reference
from amptune.policy.settings import STOCK, Autocast, Policy, amp_recipe
from amptune.search.gate.judge import Judge, cure_of
from amptune.search.gate.judgement import Judgement, judged
from amptune.workload import zoo
from amptune.workload.workload import Workload

OF_PACKAGES = ("packages", "others", "later", "full_size")
HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
KINDS = ("faults", "healthy", *OF_PACKAGES, "zoo")
ZOO_POLICIES = (
    amp_recipe("bf16"),
    amp_recipe("fp16"),
    amp_recipe("bf16", memory_format="channels_last"),
    Policy(fp32_math="tf32"),
)
# Seconds that a reference may take: enough for the most thorough one of all these models.
REFERENCE_S = 60.0


@dataclass
class OnABench:
    """The seam behind which a worker process stands, in this process: nothing is timed here."""

    bench: Bench
    reference: Reference | None = None

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity:  # noqa: ARG002
        if self.reference is None:
            self.reference = make_reference(self.bench, fp32, seconds)
        return judge(self.bench, policy, self.reference)

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:  # noqa: ARG002
        try:
            return trace_step(self.bench, policy, fp32)
        except Exception as error:  # noqa: BLE001  # what the model raises
            return failure_of(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true")
    for kind in OF_PACKAGES:
        parser.add_argument(f"--{kind.replace('_', '-')}", type=int, default=0, metavar="N")
    parser.add_argument("--zoo", nargs="*", metavar="NAME")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.summary:
        content = _joined([json.loads(file.read_text(encoding="utf-8")) for file in options.summary])
        _write(options.out, content)
    else:
        content = _measured(options)
    for kind in KINDS:
        if kind in content:
            print(f"{kind}: {_summary_of_faults(content[kind]) if kind == 'faults' else _summary(content[kind])}")


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    content: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for kind, row in _rows(options, device):
        print(*(f"{name}={value}" for name, value in row.items() if name not in {"thoroughness", "spread"}), flush=True)
        content.setdefault(kind, []).append(row)
        _write(options.out, content)
    return content


def _rows(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    part, parts = options.part
    chosen = slice(part - 1, None, parts)
    if options.faults:
        yield from (("faults", row) for row in _faults(device, (*FAULTS, *HARD_FAULTS)[chosen]))
    if any(getattr(options, kind) for kind in OF_PACKAGES):
        import package_models  # beside this program; it needs torchvision, timm and transformers

        for kind in OF_PACKAGES:
            models = dict(list(package_models.MODELS[kind].items())[chosen])
            yield from ((kind, row) for row in _healthy(device, models, getattr(options, kind)))
    if options.zoo is not None:
        yield from (("zoo", row) for row in _zoo(device, (options.zoo or zoo.NAMES)[chosen]))


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def _joined(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"device": contents[0]["device"], "torch": contents[0]["torch"]}
    for kind in KINDS:
        if rows := [row for content in contents for row in content.get(kind, ())]:
            joined[kind] = rows
    return joined


def _write(out: Path | None, content: dict[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _faults(device: torch.device, faults: Sequence[Fault]) -> Iterator[dict[str, Any]]:
    for fault in faults:
        bench = Bench(fault.workload, device)
        for dtype in HALVES:
            yield _fault(fault, bench, amp_recipe(dtype))


def _fault(fault: Fault, bench: Bench, recipe: Policy) -> dict[str, Any]:
    start_s = time.perf_counter()
    evaluator: Any = OnABench(bench)
    gatekeeper = Judge(evaluator, STOCK)
    judgement = gatekeeper.judge(recipe, seconds_for_reference=REFERENCE_S, limit_s=REFERENCE_S)
    assert isinstance(judgement, Judgement)  # noqa: S101  # autocast is never exempt, and the machine has room
    row: dict[str, Any] = {
        "model": fault.name,
        "autocast": recipe.autocast,
        "planted": list(fault.culprits),
        "breaks": recipe.autocast in fault.breaks,
        "rejected": not judgement.passes,
        "why": str(judgement),
    }
    if not judgement.passes:
        subject = inspect_model(bench, "")
        cure, findings, _ = cure_of(gatekeeper, judgement, subject, until=lambda: False, limit_s=REFERENCE_S)
        row |= {
            "named_first": findings[0].module,
            "code": findings[0].code,
            "cure": None if cure is None else list(cure.modules),
            "rules": None if cure is None else [str(rule) for rule in cure.rules],
            "modules": len(subject.modules),
            "judgements": None if cure is None else cure.judgements,
        }
    return row | {"seconds": round(time.perf_counter() - start_s, 1)}


def _healthy(device: torch.device, models: Mapping[str, Workload], times: int) -> Iterator[dict[str, Any]]:
    for name, workload in models.items():
        for seed in range(times):
            bench = Bench(workload, device, seed=1_000_003 * (1 + seed))
            of_pictures = any(isinstance(module, torch.nn.Conv2d) for module in bench.model.modules())
            slow = device.type == "cpu" and of_pictures  # no fast kernels for fp16 there
            policies = [amp_recipe(half) for half in (HALVES[:1] if slow else HALVES)]
            yield from _judgements(name, bench, policies, seed=seed)


def _zoo(device: torch.device, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        yield from _judgements(name, Bench(zoo.workload(name), device), ZOO_POLICIES)


def _judgements(name: str, bench: Bench, policies: Sequence[Policy], **more: Any) -> Iterator[dict[str, Any]]:
    reference = make_reference(bench, STOCK, REFERENCE_S)
    for policy in policies:
        judgement = judged(policy, judge(bench, policy, reference))
        parity = judgement.parity
        yield {
            "model": name,
            **more,
            "policy": str(policy),
            "rejected": not judgement.passes,
            "why": str(judgement),
            "share_of_allowed": round(judgement.used, 3),
            "looks": 1 if parity.again is None else 2,
            "drift": round(parity.drift, 3),
            "bias": round(max((gradient.bias for gradient in parity.gradients), default=0.0), 3),
            "spread": parity.spread,
            "thoroughness": asdict(reference.thoroughness),
            "reference_s": round(reference.seconds, 2),
            "seconds": round(parity.seconds, 2),
        }


def _holds(named: str | None, planted: Sequence[str]) -> bool:
    """Returns whether a module is a planted one or holds one."""
    return named is not None and any(f"{path}.".startswith(f"{named}.") for path in planted)


def _summary_of_faults(rows: Sequence[dict[str, Any]]) -> str:
    broken = [row for row in rows if row["breaks"]]
    first = sum(_holds(row.get("named_first"), row["planted"]) for row in broken)
    cured = [
        row
        for row in broken
        if all(any(_holds(one, [path]) for one in row.get("cure") or ()) for path in row["planted"])
    ]
    few = sum(len(row["cure"]) <= len(row["planted"]) + 1 for row in cured)
    sound = [row for row in rows if not row["breaks"]]
    return (
        f"{sum(row['rejected'] for row in broken)} of {len(broken)} broken candidates rejected, the planted "
        f"module named first in {first}, in the cure in {len(cured)}, with at most one more in {few}; "
        f"{sum(row['rejected'] for row in sound)} of {len(sound)} sound ones rejected"
    )


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    used = max(row["share_of_allowed"] for row in rows)
    return f"{sum(row['rejected'] for row in rows)} of {len(rows)} rejected; {used:.0%} of what is allowed at the most"


if __name__ == "__main__":
    main()
