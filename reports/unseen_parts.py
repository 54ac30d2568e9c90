"""What `unseen.py` does of one model, part by part; each adds lines to the model's file."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import AUTOTUNE_MORE_S, answer_of, last_line, policy_of_autotune, run_alone  # beside this program
from plain_loop import Arm, LimitReachedError, compile_caches, in_turn
from unseen_models import WITH_GRID
from unseen_table import FASTEST, Evidence, Line, mean_ms, ran

from amptune.policy.file_io import load
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.plan.budget import Budget

REPORTS = Path(__file__).resolve().parent
RIVAL_BUDGET_S = 120.0
# Seconds that a tuning takes beyond its budget, and that a launch or a group of the grid takes before one was seen.
TUNING_MORE_S, LAUNCH_S, LONGER = 20.0, 200.0, 1.2
# Policies of a grid that train beside one another.
AT_ONCE = max(1, min(6, len(os.sched_getaffinity(0)) // 2))
# Larger files of a study are compiled graphs.
KEPT_BYTES = 4 * 2**20
# The exit code of a part that the limit ended.
NOT_DONE = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model, and what is asked of it."""

    target: str
    evidence: Evidence
    asked: Namespace
    limit: Budget

    @property
    def name(self) -> str:
        return self.evidence.model

    def caches(self, part: str) -> Path:
        return Path(tempfile.gettempdir()) / "amptune-unseen" / self.name / part

    def missing(self) -> list[str]:
        """Returns the parts that may begin now; the launch waits for all others."""
        found = [f"amptune {one:g}" for one in self.asked.budget if not self.evidence.of("amptune", one)]
        found += ["rival"] if self.asked.rival and not self.evidence.of("pytorch-autotune") else []
        found += ["grid"] if self.has_grid and not self.evidence.of("grid ended") else []
        launched = {name for line in self.evidence.of("launch") for name in line["names"]}
        new = {name for arm in arms(self) for name in arm.names} - launched
        return found or ([f"launch {len(self.evidence.of('launched'))}"] if new else [])

    @property
    def has_grid(self) -> bool:
        return bool(self.asked.grid) and self.name in WITH_GRID

    def expected_s(self, part: str) -> float:
        kind, _, budget = part.partition(" ")
        if kind == "amptune":
            return float(budget) + TUNING_MORE_S
        before = [LONGER * line["launch_s"] for line in self.evidence.of(kind)]
        return RIVAL_BUDGET_S + AUTOTUNE_MORE_S if kind == "rival" else max(before, default=LAUNCH_S)

    def trained(self, some: Sequence[Arm], what: str, **told: object) -> None:
        seed = f"{self.name} {what} {told}"
        for row in in_turn(some, self.target, self.asked.device, self.limit, seed=seed, steps=self.asked.steps):
            self.evidence.add(what, {**told, **row})


# --- the parts ---------------------------------------------------------------------------------------------------


def tuned(work: Work, budget_s: float) -> bool:
    """Tunes by `amptune tune`, with empty caches; returns whether there was time for it, as each part does."""
    folder, caches = work.asked.out / work.name / f"{budget_s:g}", work.caches(f"amptune {budget_s:g}")
    for old in (folder, caches):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    policy, log, study = folder / "policy.yaml", folder / "log.txt", folder / "study"
    command = [sys.executable, "-m", "amptune", "tune", work.target, "--budget", f"{budget_s:g}s", "-v", "--force"]
    command += [
        "-o",
        str(policy),
        "--study",
        str(study),
        *(["--device", work.asked.device] if work.asked.device else []),
    ]
    started_s = time.monotonic()
    with compile_caches(caches):
        code = run_alone(command, log, work.limit.left_s)
    if code is None:
        return False
    for large in [path for path in study.rglob("*") if path.is_file() and path.stat().st_size > KEPT_BYTES]:
        large.unlink()
    seconds = round(time.monotonic() - started_s, 1)
    found: Line = {"failure": f"exit code {code}: {last_line(log.read_text(errors='replace'))}"}
    if policy.exists():
        answer = load(policy)
        claim = [answer.evidence.get("speedup"), *(answer.evidence.get("speedup_ci95") or [])]
        found = {"policy": policy_to_dict(replace(answer.policy, batch_size=None)), "speedup": claim}
        found |= {key: answer.evidence.get(key) for key in ("confidence", "trials")}
    work.evidence.add("amptune", {"budget_s": budget_s, "seconds": seconds, **found})
    return True


def searched(work: Work) -> bool:
    """Tunes by pytorch-autotune, with empty caches."""
    shutil.rmtree(work.caches("rival"), ignore_errors=True)
    with compile_caches(work.caches("rival")) as folder:
        answer = folder / "answer.json"
        command = [sys.executable, str(REPORTS / "autotune.py"), work.target, "--budget", str(RIVAL_BUDGET_S)]
        command += ["--out", str(answer), *(["--device", work.asked.device] if work.asked.device else [])]
        found = answer_of(command, answer, folder / "log", RIVAL_BUDGET_S, work.limit.left_s)
    if found is not None:
        work.evidence.add("pytorch-autotune", found)
    return found is not None


def gridded(work: Work) -> bool:
    """Trains by every policy of the grid, some beside one another."""
    from torch import nn

    from amptune.workload.targets import load_workload, parse_target

    model = load_workload(parse_target(work.target)).model()
    done = {policy_from_dict(line["policy"]) for line in work.evidence.of("grid")}
    left = [one for one in grid(pictures=any(isinstance(one, nn.Conv2d) for one in model.modules())) if one not in done]
    for first in range(0, len(left), AT_ONCE):
        if work.limit.left_s < work.expected_s("grid"):
            return False
        some = left[first : first + AT_ONCE]
        work.trained([Arm(names=("grid",), policy=one, caches=work.caches("plain")) for one in some], "grid")
    work.evidence.add("grid ended", {})
    return True


def grid(*, pictures: bool) -> Iterator[Policy]:
    layouts = ("contiguous", "channels_last") if pictures else ("contiguous",)
    settings = itertools.product(("default", "reduce-overhead"), ("bf16", "fp16"), layouts, (False, True))
    for mode, dtype, layout, fused in settings:
        yield replace(amp_recipe(dtype), memory_format=layout, compile=mode, fused_optimizer=fused)  # type: ignore[arg-type]


def arms(work: Work) -> list[Arm]:
    """Returns each way to train once, under all its names."""
    plain, rival = work.caches("plain"), work.caches("rival")
    found = [("stock", STOCK, plain), ("amp bf16", amp_recipe("bf16"), plain), ("amp fp16", amp_recipe("fp16"), plain)]
    for line in work.evidence.of("amptune"):
        if "policy" in line:
            name = f"amptune {line['budget_s']:g}"
            found.append((name, policy_from_dict(line["policy"]), work.caches(name)))
    config = next((line.get("config") for line in work.evidence.of("pytorch-autotune")), None)
    if config:
        fused = work.evidence.of("pytorch-autotune")[0]["fused"]
        found.append(("pytorch-autotune", policy_of_autotune(config, fused=fused), rival))
    rows = sorted(filter(ran, work.evidence.of("grid")), key=mean_ms)[:FASTEST]
    found += [(f"grid {place}", policy_from_dict(row["policy"]), plain) for place, row in enumerate(rows, start=1)]
    same = {policy: [one for one in found if one[1] == policy] for _, policy, _ in found}
    ways = [Arm(names=tuple(n for n, _, _ in of), policy=policy, caches=of[0][2]) for policy, of in same.items()]
    return ways + ([Arm(names=("its own step",), config=config, caches=rival)] if config else [])


def done(work: Work, part: str) -> int:
    kind, _, number = part.partition(" ")
    try:
        match kind:
            case "amptune":
                return 0 if tuned(work, float(number)) else NOT_DONE
            case "rival":
                return 0 if searched(work) else NOT_DONE
            case "grid":
                return 0 if gridded(work) else NOT_DONE
        work.trained(arms(work), "launch", launch=int(number))
        work.evidence.add("launched", {"launch": int(number)})
    except LimitReachedError:
        return NOT_DONE
    return 0
