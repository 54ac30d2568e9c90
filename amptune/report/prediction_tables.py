"""Predictions as text, every part of it marked as predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from amptune.report.text_table import TextRow, TextTable

if TYPE_CHECKING:
    from amptune.predict.operation import StepFigures
    from amptune.predict.prediction import Gain, Prediction
    from amptune.predict.speed_up import Known, StepSetting

__all__ = ["prediction_lines"]

_HEADINGS = ("half precision", "channels_last", "CUDA graphs", "memory, FP32", "in half", "largest batch", "in half")


def prediction_lines(
    step: StepFigures, setting: StepSetting, known: Known | None, found: Sequence[Prediction]
) -> Iterator[str]:
    """Yields a table with a row for each GPU, and below it what is missing, with the GPUs that lack it."""
    layout = "channels_last" if setting.channels_last else "contiguous"
    title = f"Predicted, not measured: {step.name}, batch {step.batch_size}, fp32_math {setting.fp32_math}, {layout}"
    rows = tuple(TextRow(name=one.gpu.name, figures=_figures(one)) for one in found)
    table = TextTable(title=title, headings=_HEADINGS, rows=rows, name="GPU", note=_note(known))
    yield from (line.text for line in table.lines(None))
    missing: dict[str, list[str]] = {}
    for one in found:
        for finding in one.missing:
            missing.setdefault(str(finding), []).append(one.gpu.name)
    for message, gpus in missing.items():
        yield f"{'all' if 1 < len(found) == len(gpus) else ', '.join(gpus)}: {message}"


def _note(known: Known | None) -> str:
    basis = f"{known.speed_up:g}× measured on {known.gpu.name}, and shapes" if known else "shapes alone"
    return (
        f"Predicted from {basis}. Half precision is over FP32; the others over half precision without them. "
        "Of ten published ratios eight to nine lay in such ranges. docs/predict.md says what verdicts are worth."
    )


def _figures(one: Prediction) -> tuple[str, ...]:
    memory = [f"{gib.low:.2g}-{gib.high:.2g} GiB" for gib in one.memory_gib]
    batches = [str(n) if n else "none fits" for n in one.largest_batch]
    last = _gain(one.channels_last) if one.channels_last else "-"
    return _gain(one.half), last, _gain(one.cuda_graphs), *memory, *batches


def _gain(gain: Gain) -> str:
    return f"{gain.verdict}, {gain.ratio.low:.2f}-{gain.ratio.high:.2f}×"
