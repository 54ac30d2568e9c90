"""Trains to the end in FP32, fp16, bf16 and under a policy, with several seeds each, and prints one table.

    python reports/parity.py --out reports/numerics/parity
    amptune tune reports/parity.py:sources -o sources.yaml
    python reports/parity.py --policy sources=sources.yaml --policy digits=digits.yaml --out reports/numerics/parity
    python reports/parity.py --models lcnet_050 --precisions FP32 bf16 --out reports/numerics/parity/refused

`digits`: the bundled network on the handwritten digits that scikit-learn ships; share of the held-out fifth that is
recognized. `sources`: a small language model of bytes, on the sources of Python's standard library; nats per byte of
modules it has not seen. Any other name is one of `package_models.py`, of whose 2,000 steps the mean loss of the last
tenth stands in the table: its batches are all new. O0 to O3 are the levels of NVIDIA's Apex.

Each seed has its own initial weights, data order and dropout, and they are the same in each precision. A run is not
stopped early. OUT.json has a row for each run as it ends, with the loss curve (the means of 60 stretches); the table
has means and standard deviations over the seeds. `--summary OUT.json …` prints it again. Several processes may each
train some of the seeds, from `--first-seed` on, into a file each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from unruly_modules import blocks  # beside this program

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.loop.long_training import train_long
from amptune.policy.file_io import load
from amptune.policy.policy_file import APEX_LEVELS
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.workload.workload import Workload
from amptune.workload.zoo.handwriting import digits
from amptune.workload.zoo.recipes import adamw

STEPS = {"digits": 660, "sources": 3000}  # 30 epochs of the digits; the loss of held-out bytes falls no more
STEPS_OF_PACKAGES = 2000
PRECISIONS = {"FP32": STOCK, "fp16": amp_recipe("fp16"), "bf16": amp_recipe("bf16"), **APEX_LEVELS}
USUAL = ("FP32", "fp16", "bf16")
WIDTH, LAYERS, CONTEXT, BATCH = 256, 4, 128, 32
# The share of the modules that is held out, and the bytes of them that are rated.
HELD_OUT, RATED = 0.1, 64
STRETCHES = 60


class Sources(nn.Module):
    """A causal transformer that maps bytes (batch, bytes) to the next bytes' logits (batch, bytes, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = blocks(WIDTH, LAYERS, causal=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.byte(text) + self.position(places))))
        return logits


def sources() -> Workload:
    return Workload(
        name="sources",
        model=Sources,
        batch=lambda n: _drawn(_bytes()[0], n),
        loss=_next_byte,
        optimizer=adamw,
        evaluate=_held_out_loss,
        batch_size=BATCH,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"digits": digits, "sources": sources}


@cache
def _bytes() -> tuple[Tensor, Tensor]:
    """Returns the bytes of the standard library's modules, and those of the modules that are held out."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    every = round(1 / HELD_OUT)
    kept = [module for i, module in enumerate(modules) if i % every]
    return tuple(_joined_bytes(part) for part in (kept, modules[::every]))  # type: ignore[return-value]  # two of them


def _joined_bytes(modules: Sequence[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def _drawn(text: Tensor, n: int) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (n, 1))
    return text[starts + torch.arange(CONTEXT + 1)].long()


def _next_byte(model: nn.Module, text: Tensor) -> Tensor:
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _held_out_loss(model: nn.Module) -> float:
    """Returns nats per byte, on the same passages at each call."""
    device, was_training = next(model.parameters()).device, model.training
    _, text = _bytes()
    starts = torch.arange(0, len(text) - CONTEXT - 1, (len(text) - CONTEXT) // RATED)[:, None]
    try:
        return float(_next_byte(model.eval(), text[starts + torch.arange(CONTEXT + 1)].long().to(device)))
    finally:
        model.train(was_training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "sources"], metavar="NAME")
    parser.add_argument("--precisions", nargs="+", choices=[*PRECISIONS], default=USUAL)
    parser.add_argument("--policy", action="append", default=[], metavar="MODEL=FILE", help="the policy of a model")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--steps", type=int, help="fewer, to see that it works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.summary:
        rows = [row for file in options.summary for row in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    else:
        rows = []
        for row in _runs(options):
            rows.append(row)
            _write(options, rows)
    print("\n".join(table_of(rows)))


def _runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each run: seed by seed, so that an interruption leaves as many of each precision."""
    device = torch.device(options.device)
    own = dict(text.split("=", 1) for text in options.policy)
    for model in options.models:
        policies = {name: PRECISIONS[name] for name in options.precisions}
        policies |= {"policy": load(own[model]).policy} if model in own else {}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            bench = Bench(_workload_of(model), device, seed=seed)
            for name, policy in policies.items():
                row = _run(bench, policy, options.steps or STEPS.get(model, STEPS_OF_PACKAGES), seed)
                print(f"{model}, seed {seed}, {name}: {row.get('evaluated', row.get('failure'))}", flush=True)
                yield {"model": model, "precision": name, "settings": str(policy), "seed": seed, **row}


def _workload_of(model: str) -> Workload:
    if model in WORKLOADS:
        return WORKLOADS[model]()
    from package_models import MODELS  # beside this program; it needs the packages

    return {**MODELS["packages"], **MODELS["others"]}[model]


def _run(bench: Bench, policy: Policy, steps: int, seed: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    try:
        curve = train_long(bench, policy, steps, seed, math.inf)
    except Exception as error:  # noqa: BLE001  # a run that breaks is a result
        return {
            "failure": str(failure_of(error)).replace(f"{Path.cwd()}/", ""),
            "seconds": time.perf_counter() - began_s,
        }
    seconds = time.perf_counter() - began_s
    losses = _in_stretches(curve.losses)
    evaluated = curve.evaluated
    if evaluated is None:
        evaluated = statistics.mean(curve.losses[-max(1, len(curve.losses) // 10) :])
    return {"evaluated": evaluated, "losses": losses, "skipped": curve.skipped, "seconds": seconds}


def _in_stretches(losses: Sequence[float]) -> list[float]:
    ends = [round(len(losses) * part / STRETCHES) for part in range(STRETCHES + 1)]
    return [round(statistics.mean(losses[start:end]), 5) for start, end in pairwise(ends) if end > start]


def _write(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    if options.out is None:
        return
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    content = {"device": gpu, "torch": torch.__version__, "runs": rows}
    options.out.with_suffix(".json").write_text(json.dumps(content), encoding="utf-8")


def table_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table: a row for each model, a column for each precision."""
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    yield f"| model | {' | '.join(precisions)} | seeds |"
    yield "|---" * (len(precisions) + 2) + "|"
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        cells = [_cell([row for row in of_model if row["precision"] == name]) for name in precisions]
        yield f"| {model} | {' | '.join(cells)} | {len({row['seed'] for row in of_model})} |"


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns "mean ± standard deviation", and how many runs broke if any did."""
    ended = [row["evaluated"] for row in rows if "evaluated" in row]
    broke = f" ({len(rows) - len(ended)} of {len(rows)} broke)" if len(ended) < len(rows) else ""
    if not ended:
        return f"-{broke}"
    apart = f" ± {statistics.stdev(ended):.4f}" if len(ended) > 1 else ""
    return f"{statistics.mean(ended):.4f}{apart}{broke}"


if __name__ == "__main__":
    main()
