"""amptune and pytorch-autotune on models that neither was made for: how fast is a plain training loop behind each?

    pip install pytorch-autotune==2.0.0 torchvision timm transformers torch_geometric
    python reports/unseen.py --out reports/NAME --lanes 2 --limit 570
    python reports/unseen.py reports/other_models.py:gan --out reports/NAME --no-rival
    python reports/unseen.py --out reports/NAME --table

Without targets, of the twelve in `unseen_models.py`. Model after model: `amptune tune` with each budget, in a process
of its own, as a user calls it; pytorch-autotune once, with 120 s; for four of the models each policy of {bf16, fp16} ×
{default, reduce-overhead} × layout × fused optimizer. Each tuner begins with empty caches of torch.compile. Then the
README's loop (`plain_loop.py`) trains by stock PyTorch, the AMP recipes, pytorch-autotune's own step, the policy
nearest to its choice, amptune's policies and the grid's fastest: in turn, in fresh processes.

Appends a line to OUT/MODEL.jsonl as each part is done, and does nothing that stands there again. OUT/MODEL/BUDGET keeps
log, policy and study of a tuning. Starts nothing that is not expected to end within `--limit`, and says what is left;
the same command goes on. With several lanes as many parts are worked on at once, each with a GPU and CPU cores.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lanes import EARLIER_S, Job, end_with_parent, lanes_of, run  # beside this program
from unseen_models import MODELS
from unseen_parts import Work, done
from unseen_table import Evidence, table

from amptune.search.plan.budget import Budget

BUDGETS_S = (120.0, 60.0)
MODELS_FILE = Path(__file__).resolve().with_name("unseen_models.py")


def main() -> int:
    asked = parsed()
    asked.out.mkdir(parents=True, exist_ok=True)
    limit = Budget(seconds=asked.limit)
    targets = [one if ":" in one else f"{MODELS_FILE}:{one}" for one in asked.targets or MODELS]
    works = [
        Work(target=one, evidence=Evidence(asked.out / f"{one.rpartition(':')[2]}.jsonl"), asked=asked, limit=limit)
        for one in targets
    ]
    if asked.part:
        return done(works[0], asked.part)
    if not asked.table:
        run(lanes_of(asked.lanes, gpus=asked.device != "cpu"), lambda *told: next_job(works, *told), limit)
        for work in works:
            if parts := work.missing():
                print(f"{work.name}: left for another command: {', '.join(parts)}", file=sys.stderr, flush=True)
    print(table([Evidence(path) for path in sorted(asked.out.glob("*.jsonl"))]))
    return 0


def next_job(works: Sequence[Work], running: Sequence[Job], failed: Sequence[Job], left_s: float) -> Job | None:
    """Returns the first part of the first model that may begin and is expected to end in time."""
    taken = {job.name for job in (*running, *failed)}
    jobs = (job_of(work, part) for work in works for part in work.missing())
    return next((job for job in jobs if job.name not in taken and job.expected_s <= left_s - EARLIER_S), None)


def job_of(work: Work, part: str) -> Job:
    told = [f"--out={work.asked.out}", f"--part={part}", *(f"--{name}={value}" for name, value in chosen(work.asked))]
    return Job(
        name=f"{work.name}, {part}",
        command=(sys.executable, __file__, work.target, *told),
        expected_s=work.expected_s(part),
    )


def chosen(asked: argparse.Namespace) -> list[tuple[str, object]]:
    """Returns the options that a part has to know."""
    return [(name, value) for name in ("steps", "device") if (value := getattr(asked, name)) is not None]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="a name of unseen_models.py, or FILE.py:NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, nargs="+", default=BUDGETS_S, metavar="SECONDS", help="default: 120 60")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for the whole command")
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="GPUs of this host to use (default 1)")
    parser.add_argument("--steps", type=int, help="of each timed block, which all count; default: half a second")
    parser.add_argument("--device", default=None)
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="leave pytorch-autotune out")
    parser.add_argument("--no-grid", dest="grid", action="store_false", help="leave the grid of four models out")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    if "--part" in sys.argv:
        end_with_parent()
    sys.exit(main())
