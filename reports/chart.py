"""The README's bar chart: how fast each workload trains, relative to stock PyTorch, as an SVG picture.

    python reports/chart.py           # draws docs/results.svg from h200/rivals/
    python reports/chart.py --check   # exits with 1 if that file is not what would be drawn

No figure stands here: all come from the raw samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from amptune.measure.results.outcome import Measurement, outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK
from amptune.report.plot import Axis

HERE = Path(__file__).resolve().parent
RIVALS, CHART = HERE / "h200" / "rivals", HERE.parent / "docs" / "results.svg"

# The workloads' names and sizes as the README's table has them.
NAMES = {
    "conv1": ("single convolution", ""),
    "mlp3": ("three Linear(4096)", ""),
    "resnet18": ("ResNet-18", "224²"),
    "resnet50": ("ResNet-50", "224²"),
    "vgg16": ("VGG16-BN", "32²"),
    "densenet161": ("DenseNet-161*", "32²"),
    "seresnext50": ("SE-ResNeXt50*", "32²"),
    "deeplabv3plus": ("DeepLabV3+ R101", "512×896"),
    "bert_base": ("BERT-base", "512 tokens"),
    "gpt2": ("GPT-2", "1024 tokens"),
}
# The names with a star: their steps wait for the host, which was slow and noisy (README.md here, "h200/rivals").
HOST_BOUND = {workload for workload, (name, _) in NAMES.items() if name.endswith("*")}

# In the viewBox's units. A phone shows the picture at 0.42 of its size, so letters are large; columns have room for
# DejaVu Sans, the widest of the fonts that a system may have.
WIDTH, MARGIN, LEFT, RIGHT = 860, 6, 290, 790
HEADING, LEGEND, TICKS, ROWS = 22, 54, 88, 98
ROW, LINE = 40, 25
# Each contender: where its name stands in the legend, then the top and height of its bar within a row.
CONTENDERS = {"amptune": (MARGIN, 0, 15), "pytorch-autotune": (136, 16, 7), "best AMP recipe": (342, 24, 7)}

STYLE = """
text { font: 18px system-ui, -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
.soft { fill: #59636e; }
.heading, .value { font-weight: 600; font-size: 20px; }
.name { font-size: 19px; }
.name .soft, .value .soft { font-weight: 400; font-size: 17px; }
.grid { stroke: #d1d9e0; }
.stock { stroke: #1f2328; stroke-width: 1.5; }
.amptune { fill: #2457c5; }
.pytorch-autotune { fill: #6e7781; }
.best-AMP-recipe { fill: #b1bac3; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .soft { fill: #9198a1; }
  .grid { stroke: #30363d; }
  .stock { stroke: #f0f6fc; }
  .amptune { fill: #6ea4ff; }
  .pytorch-autotune { fill: #98a2ad; }
  .best-AMP-recipe { fill: #59626d; }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One workload's step times, of stock PyTorch and of the contenders; `is_stock` if amptune kept stock PyTorch."""

    workload: str
    times_ms: Mapping[str, float]
    is_stock: bool
    is_provisional: bool
    machine: str

    @property
    def name(self) -> str:
        return NAMES[self.workload][0] + ("†" if self.is_provisional else "")

    @property
    def speeds(self) -> dict[str, float]:
        """The contenders' speeds relative to stock PyTorch."""
        return {name: self.times_ms["stock"] / self.times_ms[name] for name in CONTENDERS}


def results() -> list[Result]:
    """Reads the evidence, the largest gain of amptune first."""
    found = [result_of(path) for path in sorted(RIVALS.glob("*.json"))]
    return sorted(found, key=lambda result: -result.speeds["amptune"])


def result_of(path: Path) -> Result:
    data = json.loads(path.read_text())
    tuned = data["amptune"]
    return Result(
        workload=data["workload"],
        times_ms=times_ms_of(data["comparison"], data["autotune"]["own_step_ms"]),
        is_stock=policy_from_dict(tuned["policy"]) == STOCK,
        is_provisional=tuned["provisional"],
        machine=f"{tuned['hardware']}, torch {'.'.join(tuned['software']['torch'].split('.')[:2])}",
    )


def times_ms_of(comparison: Mapping[str, Any], own_step_ms: Sequence[float]) -> dict[str, float]:
    """Returns the step times; pytorch-autotune's is the faster of its choice as a policy and its own step."""
    ms = {name: step_ms(comparison["rounds"], policy) for name, policy in comparison["contenders"].items()}
    return {
        "stock": ms["stock"],
        "amptune": ms["amptune"],
        "pytorch-autotune": min(ms["pytorch-autotune"], statistics.median(own_step_ms)),
        "best AMP recipe": min(ms["amp bf16"], ms["amp fp16"]),
    }


def step_ms(rounds: Sequence[Mapping[str, Any]], policy: Mapping[str, Any]) -> float:
    """Returns the geometric mean over a policy's blocks of their steps' mean time; none of these blocks failed."""
    lines = [line for one in rounds for line in one["rows"] if line["policy"] == policy]
    outcomes = (outcome_from_dict(line["outcome"]) for line in lines)
    return statistics.geometric_mean(outcome.mean_ms for outcome in outcomes if isinstance(outcome, Measurement))


def _across(axis: Axis, value: float) -> float:
    """Returns where a value stands between the left and the right end of the chart."""
    return LEFT + axis.place(value) / 100.0 * (RIGHT - LEFT)


def drawn(found: Sequence[Result]) -> str:
    """Returns the chart as SVG."""
    end = ROWS + ROW * len(found)
    high = max(speed for result in found for speed in result.speeds.values())
    axis = Axis(label="", low=0, high=high, step=1)
    rows = [part for place, result in enumerate(found) for part in _row(result, ROWS + ROW * place, axis)]
    captions = [_text(MARGIN, end + 20 + LINE * i, line, "soft") for i, line in enumerate(captions_of(found))]
    size = f'viewBox="0 0 {WIDTH} {end + 8 + LINE * len(captions)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">'
    return "\n".join([opening, *_described(found), *_head(found), *_grid(axis, end - 4), *rows, *captions, "</svg>\n"])


def captions_of(found: Sequence[Result]) -> list[str]:
    """Returns the lines below the chart: the geometric means, and those without the workloads that wait for the host.

    Both have the contenders in the same order.
    """
    subsets = found, [result for result in found if result.workload not in HOST_BOUND]
    means = [[statistics.geometric_mean(r.speeds[name] for r in subset) for name in CONTENDERS] for subset in subsets]
    named = (f"{name} {mean:.1f}×" for name, mean in zip(CONTENDERS, means[0], strict=True))
    return [
        f"Geometric means: {', '.join(named)};",
        f"without those marked *, which waited for a slow, noisy host: {', '.join(f'{m:.1f}×' for m in means[1])}.",
        "† Provisional: too little time for a proof.",
    ]


def _described(found: Sequence[Result]) -> Iterator[str]:
    """Yields the picture in words, for who does not see it, and its colours."""
    yield f'<title id="title">Training speed relative to stock PyTorch, {_machines(found)}</title>'
    rows = (
        f"{' '.join([result.name, NAMES[result.workload][1]]).strip()}: "
        f"{', '.join(f'{name} {speed:.1f}×' for name, speed in result.speeds.items())}."
        for result in found
    )
    yield f'<desc id="desc">{escape(" ".join([*rows, *captions_of(found)]))}</desc>'
    yield f"<style>{STYLE}</style>"


def _head(found: Sequence[Result]) -> Iterator[str]:
    yield _text(MARGIN, HEADING, "Training speed relative to stock PyTorch; longer is faster", "heading")
    for name, (x, _, _) in CONTENDERS.items():
        yield f'<rect class="{_class(name)}" x="{x}" y="{LEGEND - 14}" width="16" height="15"/>'
        yield _text(x + 24, LEGEND, name, "legend")
    yield _text(WIDTH - MARGIN, LEGEND, _machines(found), "soft", "end")


def _grid(axis: Axis, end: float) -> Iterator[str]:
    """Yields a line and a number for each multiple of stock PyTorch's speed."""
    for tick in axis.ticks[1:]:
        x, kind, words = _across(axis, tick), *(("stock", "stock PyTorch = ") if tick == 1 else ("grid", ""))
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TICKS + 6}" y2="{end}"/>'
        yield _text(x + 13, TICKS, f"{words}{axis.text(tick)}×", "soft", "end")


def _row(result: Result, top: float, axis: Axis) -> Iterator[str]:
    """Yields a workload's name, its bars, and amptune's value behind its bar."""
    name, size = (escape(part) for part in (result.name, NAMES[result.workload][1]))
    sized = f'{name} <tspan class="soft">{size}</tspan>' if size else name
    yield f'<text class="name" x="{LEFT - 12}" y="{top + 22}" text-anchor="end">{sized}</text>'
    for contender, (_, below, height) in CONTENDERS.items():
        at = f'x="{LEFT}" y="{top + below}" width="{_across(axis, result.speeds[contender]) - LEFT:.1f}"'
        yield f'<rect class="{_class(contender)}" {at} height="{height}"/>'
    note = (
        ' <tspan class="soft" dx="4">nothing faster was found: stock PyTorch is kept</tspan>' if result.is_stock else ""
    )
    at = f'x="{_across(axis, result.speeds["amptune"]) + 8:.1f}" y="{top + 15}"'
    yield f'<text class="value" {at}>{result.speeds["amptune"]:.1f}×{note}</text>'


def _machines(found: Sequence[Result]) -> str:
    return "; ".join(sorted({result.machine for result in found}))


def _class(contender: str) -> str:
    return contender.replace(" ", "-")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if docs/results.svg is stale")
    arguments = parser.parse_args()
    chart = drawn(results())
    if not arguments.check:
        CHART.parent.mkdir(exist_ok=True)
        CHART.write_text(chart, encoding="utf-8", newline="\n")
    elif not CHART.exists() or CHART.read_text(encoding="utf-8") != chart:
        print(f"{CHART}: not what reports/h200/rivals/ says; `python reports/chart.py` draws it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
