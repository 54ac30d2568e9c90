"""Scores `amptune predict` on published ratios, leaving one GPU out, and fits its few efficiencies.

    python reports/published.py --fit      follows every model, fits, writes amptune/predict/fitted.yaml, then scores
    python reports/published.py            scores with what is written there for spreads, refitting without each GPU

Both write reports/published/scores.json and reports/published/scores.md. Following the models takes some minutes and
needs no GPU; `--steps FILE` keeps what was followed.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import published_models
import published_sequences
import published_speech
from published_fit import Case, cases_of, fitted
from published_rows import FOLDER, own_rows, published_rows
from published_scores import Judged, in_markdown, scores_of

import amptune.predict
from amptune.policy.yaml_text import dump
from amptune.predict.operation import StepFigures
from amptune.predict.roofline import Efficiency
from amptune.predict.shape_pass import follow_step
from amptune.predict.speed_up import Calibration, Known, half_speed_up, relation, transfer_name
from amptune.workload.workload import Workload
from amptune.workload.zoo import workload

FITTED = Path(amptune.predict.__file__).with_name("fitted.yaml")
_LOG_ERRORS: dict[tuple[int, int], float] = {}  # by the identities of a case and of efficiencies, which stay
_NORMAL_90 = 1.645  # standard deviations on either side that hold nine of ten values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="write fitted.yaml anew")
    parser.add_argument("--steps", type=Path, help="a file that keeps the followed steps")
    asked = parser.parse_args()
    published, left = published_rows()
    rows = [*published, *own_rows()]
    steps = followed({row.workload for row in rows}, asked.steps)
    cases = cases_of(rows, steps)
    learned = [case for case in cases if case.row.learned]
    efficiency, without = fitted(learned)
    pairs = pairs_of(cases)
    calibrations = {gpu: calibrated(cases, pairs, without, leaving=gpu) for gpu in without}
    if asked.fit:
        whole = calibrated(cases, pairs, without, leaving=None)
        write_fitted(Calibration(efficiency=efficiency, transfer=whole.transfer, spread=whole.spread))
    judged = [*judged_alone(cases, calibrations), *judged_from(pairs, calibrations)]
    scores = scores_of(judged)
    data = {"command": "python reports/published.py", "efficiency": asdict(efficiency), "scores": scores,
            "rows": [one.as_dict() for one in judged if one.how == "shapes"], "left_out": left}  # fmt: skip
    (FOLDER / "scores.json").write_text(json.dumps(data, indent=1) + "\n")
    (FOLDER / "scores.md").write_text(in_markdown(scores, judged, left))
    print((FOLDER / "scores.md").read_text())


def followed(names: set[str], file: Path | None) -> dict[str, StepFigures]:
    """Returns the step of each workload, from the file if it is there."""
    steps: dict[str, StepFigures] = pickle.loads(file.read_bytes()) if file and file.exists() else {}  # noqa: S301  # our own
    for name in sorted(names - steps.keys()):
        print(f"following {name}", flush=True)
        bundled = name.removeprefix("zoo:")
        steps[name] = follow_step(workload(bundled) if bundled != name else _published(name))
        if file:
            file.write_bytes(pickle.dumps(steps))
    return steps


def _published(name: str) -> Workload:
    rooms = (published_models, published_sequences, published_speech)
    found: Workload = next(getattr(room, name) for room in rooms if hasattr(room, name))()
    return found


def pairs_of(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Returns (source, target) for each two GPUs of one table and model; one row of each source."""
    alike: dict[Any, list[Case]] = defaultdict(list)
    for case in cases:
        alike[case.row.case].append(case)
    pairs = []
    for group in alike.values():
        sources = {case.row.gpu: case for case in group}
        pairs += [(source, target) for target in group for source in sources.values() if source.gpu != target.gpu]
    return pairs


def kinship(source: Case, target: Case) -> str:
    return relation(source.gpu, target.gpu)


def calibrated(
    cases: Sequence[Case],
    pairs: Sequence[tuple[Case, Case]],
    without: Mapping[str, Efficiency],
    leaving: str | None,
) -> Calibration:
    """Returns transfer and spreads from all targets but one, each predicted by efficiencies fitted without it."""
    learned = [case for case in cases if case.row.learned and case.row.gpu != leaving]
    alone = [(_log_error(case, without[case.row.gpu]), case.row.gpu) for case in learned]
    spread = {"shapes": _spread([error for error, _ in alone], [gpu for _, gpu in alone])}
    transfer: dict[str, float] = {}
    for how in ("same_kind", "same_features", "other_features"):
        chosen = [(s, t) for s, t in pairs if kinship(s, t) == how and leaving not in (s.row.gpu, t.row.gpu)]
        known = np.array([_log_error(s, without[t.row.gpu]) for s, t in chosen])
        own = np.array([_log_error(t, without[t.row.gpu]) for _, t in chosen])
        shares = np.linspace(0, 1, 11)
        carried = np.zeros_like(known)
        for name, ours in ((how, ~_far_less(known)), (f"{how}_slower", _far_less(known))):
            off = [np.abs(own[ours] - share * known[ours]).sum() for share in shares]
            transfer[name] = float(shares[int(np.argmin(off))])
            carried += np.where(ours, transfer[name] * known, 0.0)
        spread[how] = _spread(list(own - carried), [t.row.gpu for _, t in chosen])
    return Calibration(
        efficiency=without[leaving] if leaving else next(iter(without.values())),
        transfer={how: round(share, 2) for how, share in transfer.items()},
        spread={**spread, **_layout_spreads(cases, without)},
    )


def _log_error(case: Case, efficiency: Efficiency) -> float:
    key = id(case), id(efficiency)
    if key not in _LOG_ERRORS:
        _LOG_ERRORS[key] = math.log(case.row.ratio / case.modelled(efficiency))
    return _LOG_ERRORS[key]


def _far_less(errors: Any) -> Any:
    return np.array([transfer_name("", math.exp(error)) != "" for error in errors], dtype=bool)


def _spread(errors: list[float], gpus: list[str]) -> float:
    """Returns the standard deviation whose range would hold nine of ten errors, each GPU counting alike."""
    weights = np.array([1 / gpus.count(gpu) for gpu in gpus])
    sizes = np.abs(errors)
    order = np.argsort(sizes)
    held = np.cumsum(weights[order]) / weights.sum()
    return float(f"{sizes[order][np.searchsorted(held, 0.9)] / _NORMAL_90:.3g}")


def _layout_spreads(cases: Sequence[Case], without: Mapping[str, Efficiency]) -> dict[str, float]:
    """Returns the spread of channels_last over contiguous in half, from the own rows on the one GPU that has them."""
    halves = {(c.row.workload, c.row.setting.fp32_math, c.row.place, c.row.setting.channels_last): c for c in cases
              if c.row.table.startswith("own")}  # fmt: skip
    errors = []
    for (name, math_, place, last), case in halves.items():
        other = halves.get((name, math_, place, True))
        if not last and other and case.row.fp32_per_s and other.row.fp32_per_s:
            half = [(one.row.fp32_per_s or 0.0) * one.row.ratio for one in (case, other)]
            errors.append(math.log(half[1] / half[0] / layout_gain(case, without["H200"])))
    return {"channels_last": _spread(errors, ["H200"] * len(errors)) if errors else 0.3, "cuda_graphs": 0.2}


def layout_gain(case: Case, efficiency: Efficiency) -> float:
    from amptune.predict.roofline import step_seconds

    seconds = [
        step_seconds(case.step.half, case.gpu, efficiency, fp32_math="tf32", channels_last=last)
        for last in (False, True)
    ]
    return seconds[0] / seconds[1]


def judged_alone(cases: Sequence[Case], calibrations: Mapping[str, Calibration]) -> list[Judged]:
    return [
        Judged(how="shapes", row=case.row, source=None, weight=1.0, nearest=None,
               ratio=half_speed_up(case.step, case.gpu, case.row.setting, None, calibrations[case.row.gpu]))
        for case in cases if case.row.learned
    ]  # fmt: skip


def judged_from(pairs: Sequence[tuple[Case, Case]], calibrations: Mapping[str, Calibration]) -> list[Judged]:
    """Judges each target from each source; a target counts once, however many sources it has."""
    times: dict[tuple[int, str], int] = defaultdict(int)
    for source, target in pairs:
        times[id(target), kinship(source, target)] += 1
    return [
        Judged(
            how=kinship(source, target), row=target.row, source=source.row.gpu, nearest=source.row.ratio,
            weight=1 / times[id(target), kinship(source, target)],
            ratio=half_speed_up(target.step, target.gpu, target.row.setting,
                                Known(gpu=source.gpu, speed_up=source.row.ratio, batch_sizes=source.batch_sizes),
                                calibrations[target.row.gpu]),
        )
        for source, target in pairs
    ]  # fmt: skip


def write_fitted(found: Calibration) -> None:
    head = FITTED.read_text().splitlines()[0]
    data = {"efficiency": asdict(found.efficiency), "transfer": dict(found.transfer), "spread": dict(found.spread)}
    FITTED.write_text(head + "\n" + dump(data))


if __name__ == "__main__":
    main()
