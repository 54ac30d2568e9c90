"""amptune and pytorch-autotune on models of libraries: how fast is a plain training loop behind each, by budget?

    pip install pytorch-autotune==2.0.0 torchvision timm transformers
    python reports/foreign.py --out reports/NAME --limit 570 --lanes 2 --budget 120
    python reports/foreign.py --out reports/NAME --plan unruly --limit 570 --lanes 2
    python reports/foreign.py --out reports/NAME --table

Goes through a plan of `foreign_table.py`: `foreign`, `first` or `unruly`. For each budget and model, with empty caches
of torch.compile for each tuning: `amptune.tune`, three times for an unruly model; for a foreign one pytorch-autotune,
once a model, since a result serves every budget that its search ended within; with 300 s an exhaustive grid of dtype ×
layout × torch.compile, and the fused optimizer with its fastest three. Then the README's loop (`plain_loop.py`) trains
by stock PyTorch, the AMP recipes, amptune's policies, pytorch-autotune's own step, the policy nearest to its choice,
the grid's fastest, and for `first` the policy in reports/: in turn, in launches of fresh processes. Unruly models train
for hundreds of steps, all of which count.

Appends a line to OUT/MODEL.jsonl as each is done, and does nothing that stands there again. Starts nothing that is not
expected to end within `--limit`; the next command goes on. With several lanes as many models are worked on at once,
each lane with a GPU and a share of the CPU cores; caches of torch.compile are those of a model. A MODEL is a name, or a
target like train.py:workload.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foreign_parts import Work, do, expected_s, missing, search_by_autotune  # beside this program
from foreign_table import BUNDLED, FIRST, MODELS, PLANS, UNRULY, Evidence, Plan, table
from lanes import EARLIER_S, Job, end_with_parent, lanes_of, run
from plain_loop import LimitReachedError
from unruly_table import is_unruly, unruly_table

from amptune.search.plan.budget import Budget

UNASKED_BUDGET_S = 120.0
# Of a part that the limit ended.
NOT_DONE = 3


def main() -> int:
    arguments = parsed()
    if arguments.only_autotune:
        search_by_autotune(target_of(arguments.models[0]), arguments.budget, arguments.device, arguments.out)
        return 0
    works = works_of(arguments)
    if arguments.part:
        return done(works[0], arguments.part)
    if not arguments.table:
        if any(work.plan.autotune for work in works) and importlib.util.find_spec("pytorch_autotune") is None:
            sys.exit("pytorch-autotune is not there: pip install pytorch-autotune==2.0.0, or --no-autotune")
        arguments.out.mkdir(parents=True, exist_ok=True)
        measure_all(works, arguments)
    evidences = [Evidence(path) for path in sorted(arguments.out.glob("*.jsonl"))]
    unruly = [one for one in evidences if is_unruly(one)]
    foreign = [one for one in evidences if not is_unruly(one)]
    print("\n\n".join(([table(foreign)] if foreign else []) + ([unruly_table(unruly)] if unruly else [])))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the plan, or a target; default: all of the plan")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", choices=PLANS, default="foreign", help="default: foreign")
    parser.add_argument("--budget", type=float, help="only this budget of the plan; of a target (default 120)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="GPUs of this host to use (default 1)")
    parser.add_argument(
        "--launches", type=int, default=1, help="of each comparison, those of before included (default 1)"
    )
    parser.add_argument("--tunings", type=int, help="of each model and budget; default: as the plan says")
    parser.add_argument("--device", default=None)
    parser.add_argument("--caches", type=Path, help="where torch.compile keeps what it made, for the launches")
    parser.add_argument("--no-autotune", action="store_true", help="leave pytorch-autotune out")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--only-autotune", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def works_of(arguments: argparse.Namespace) -> list[Work]:
    plan = PLANS[arguments.plan]
    plan = replace(
        plan, autotune=plan.autotune and not arguments.no_autotune, tunings=arguments.tunings or plan.tunings
    )
    return [
        Work(
            evidence=Evidence(arguments.out / f"{model.rpartition(':')[2]}.jsonl"),
            target=target_of(model),
            budget_s=budget_s,
            plan=plan,
            limit=Budget(seconds=arguments.limit),
            device=arguments.device,
            launches=arguments.launches,
            caches=arguments.caches or Path(tempfile.gettempdir()) / "amptune-foreign",
        )
        for budget_s, model in planned(plan, arguments.models, arguments.budget)
    ]


def planned(plan: Plan, models: Sequence[str], budget_s: float | None) -> list[tuple[float, str]]:
    """Returns (budget, model) in the plan's order, then targets that are not in it."""
    jobs = [(seconds, model) for seconds, names in plan.jobs for model in names]
    own = [model for model in models if model not in (*MODELS, *FIRST, *UNRULY)]
    chosen = [
        (seconds, model)
        for seconds, model in jobs
        if (not models or model in models) and budget_s in (None, seconds)
    ]  # fmt: skip
    return chosen + [(budget_s or UNASKED_BUDGET_S, model) for model in own]


def target_of(model: str) -> str:
    if model in BUNDLED:
        return f"amptune.workload.zoo:{model}"
    for models, file in ((MODELS, "foreign_models.py"), (FIRST, "first_models.py"), (UNRULY, "unruly_models.py")):
        if model in models:
            return f"{Path(__file__).resolve().with_name(file)}:{model}"
    return model


def measure_all(works: Sequence[Work], arguments: argparse.Namespace) -> None:
    """Does what is missing, budget after budget: of what is expected to end in time, the longest part first."""
    limit = Budget(seconds=arguments.limit)

    def next_job(running: Sequence[Job], failed: Sequence[Job], left_s: float) -> Job | None:
        taken = {job.name for job in (*running, *failed)}
        for _, same_budget in itertools.groupby(works, key=lambda work: work.budget_s):
            jobs = [job_of(work, part, arguments) for work in same_budget for part in missing(work)]
            fitting = [job for job in jobs if job.name not in taken and job.expected_s <= left_s - EARLIER_S]
            if fitting:
                return max(fitting, key=lambda job: job.expected_s)
        return None

    run(lanes_of(arguments.lanes, gpus=arguments.device != "cpu"), next_job, limit)
    for work in works:
        if parts := missing(work):
            names = f"{work.evidence.model}, {work.budget_s:g} s: {', '.join(parts)}"
            print(f"{names}: left for another command", file=sys.stderr, flush=True)


def job_of(work: Work, part: str, arguments: argparse.Namespace) -> Job:
    told = ["--out", arguments.out, "--plan", arguments.plan, "--budget", work.budget_s, "--caches", work.caches]
    told += ["--device", arguments.device] if arguments.device else []
    told += ["--tunings", arguments.tunings] if arguments.tunings else []
    # pytorch-autotune's result may serve other budgets: of one model, it runs once at a time
    what = part if part == "pytorch-autotune" else f"{work.budget_s:g} s, {part}"
    return Job(
        name=f"{work.evidence.model}, {what}",
        command=(sys.executable, __file__, work.target, "--part", part, *map(str, told)),
        expected_s=expected_s(work, part),
    )


def done(work: Work, part: str) -> int:
    try:
        return 0 if do(work, part) else NOT_DONE
    except LimitReachedError:
        return NOT_DONE


if __name__ == "__main__":
    if "--part" in sys.argv:
        end_with_parent()
    sys.exit(main())
