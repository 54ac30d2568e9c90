"""The command `amptune predict`: what should pay on a GPU that is not here."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import json_option, print_json, target_argument

if TYPE_CHECKING:
    from amptune.predict.operation import StepFigures
    from amptune.predict.prediction import Gain, Prediction
    from amptune.predict.speed_up import Known, StepSetting

__all__ = ["predict_command"]

_NOTE = "predicted, not measured"


@click.command("predict", short_help="What should pay on a GPU that is not here? Predicted, not measured.")
@target_argument
@click.option("--gpu", "gpus", required=True, metavar="NAME,…|all", help="V100, T4, GTX-1080-Ti, RTX-4090, …")
@click.option("--measured", metavar="GPU=SPEEDUP|FILE", help="Half over FP32 on another GPU, or a policy tuned there.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Default: the workload's.")
@click.option("--half-batch-size", type=click.IntRange(min=1), help="In half precision. Default: --batch-size.")
@click.option("--fp32-math", type=click.Choice(["stock", "ieee", "tf32"]), default="stock", show_default=True,
              help="What FP32 operations use in training today.")  # fmt: skip
@click.option("--memory-format", type=click.Choice(["contiguous", "channels_last"]), default="contiguous",
              show_default=True, help="That of training today.")  # fmt: skip
@json_option
def predict_command(
    target: str,
    arguments: tuple[str, ...],
    gpus: str,
    measured: str | None,
    batch_size: int | None,
    half_batch_size: int | None,
    fp32_math: Any,
    memory_format: str,
    as_json: bool,
) -> None:
    """Predict whether half precision, channels_last and CUDA graphs pay for TARGET on GPUs that are not here.

    TARGET is FILE.py[:NAME] or PACKAGE.MODULE:NAME; what stands behind -- are its script's own arguments.

    One training step is followed by the shapes of its tensors, which needs no GPU; data sheets of the GPUs say how long
    each operation should take. Nothing is measured and no policy is written. See docs/predict.md for how far it is off.
    """
    from amptune.predict.gpu_table import gpus_named

    chosen = gpus_named(gpus)
    known = _known(measured)
    with redirect_stdout(sys.stderr):
        step = _step_of(target, arguments, batch_size)
    from amptune.predict.prediction import predicted
    from amptune.predict.speed_up import StepSetting

    setting = StepSetting(
        fp32_math=fp32_math, channels_last=memory_format == "channels_last", half_batch_size=half_batch_size
    )
    found = [predicted(step, gpu, setting, known) for gpu in chosen]
    if as_json:
        print_json("amptune.predict/1", _as_data(target, step, setting, known, found))
    else:
        from amptune.report.prediction_tables import prediction_lines

        for line in prediction_lines(step, setting, known, found):
            click.echo(line)


def _known(text: str | None) -> Known | None:
    from amptune.predict.known_speed_up import known_from

    return known_from(text) if text else None


def _step_of(target: str, arguments: tuple[str, ...], batch_size: int | None) -> StepFigures:
    from amptune.predict.shape_pass import follow_step
    from amptune.workload.targets import load_workload, parse_target

    parsed = parse_target(target)
    sys.argv = [parsed.place, *arguments]
    return follow_step(load_workload(parsed), batch_size)


def _as_data(
    target: str, step: StepFigures, setting: StepSetting, known: Known | None, found: list[Prediction]
) -> dict[str, Any]:
    return {
        "note": _NOTE,
        "target": target,
        "batch_size": step.batch_size,
        "setting": asdict(setting),
        "measured": known and {"gpu": known.gpu.name, "speed_up": known.speed_up},
        "operations": _operations(step),
        "predictions": [_prediction(one) for one in found],
        "findings": [],
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "gpu": one.gpu.name,
        "note": _NOTE,
        "half": _gain(one.half),
        "channels_last": one.channels_last and _gain(one.channels_last),
        "cuda_graphs": _gain(one.cuda_graphs),
        "memory_gib": {"fp32": asdict(one.memory_gib[0]), "half": asdict(one.memory_gib[1])},
        "largest_batch": {"fp32": one.largest_batch[0], "half": one.largest_batch[1]},
        "memory_bound": round(one.memory_bound, 3),
        "host_share": round(one.host_share, 3),
        "findings": [finding.as_dict() for finding in one.missing],
        "source": one.gpu.source,
    }


def _gain(gain: Gain) -> dict[str, Any]:
    return {"verdict": gain.verdict, **{end: round(value, 3) for end, value in asdict(gain.ratio).items()}}


def _operations(step: StepFigures) -> list[dict[str, Any]]:
    """Returns the step's work in FP32 by module and kind of operation; a backward pass has no module."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for one in step.fp32.operations:
        row = sums.setdefault((one.module, one.kind), {"module": one.module or None, "kind": one.kind, "flops": 0.0,
                                                       "bytes": 0.0, "launches": 0.0})  # fmt: skip
        for figure in ("flops", "bytes", "launches"):
            row[figure] += getattr(one, figure)
    return list(sums.values())
