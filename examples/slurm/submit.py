"""Tunes on each kind of GPU by submitit and puts the policies into one profile.

pip install submitit; python examples/slurm/submit.py workload.py:workload a100 h200   (features of the nodes)
"""

import subprocess
import sys
from pathlib import Path

import submitit

BUDGET_S, MORE_MIN = 300, 10  # submitit ends a job 90 s before its time is up


def tune(target: str, policy: Path) -> Path:
    """Tunes on this node; what amptune says stands in the job's log."""
    study = policy.with_suffix(".study")
    options = ["--budget", f"{BUDGET_S}s", "--study", str(study), "-o", str(policy)]
    subprocess.run(["amptune", "tune", target, *options], check=True)
    return policy


def main(target: str, *features: str) -> None:
    folder = Path("policies")
    folder.mkdir(exist_ok=True)
    executor = submitit.AutoExecutor(folder="submitit")
    jobs = []
    for feature in features:
        executor.update_parameters(
            name=f"amptune-{feature}",
            timeout_min=BUDGET_S // 60 + MORE_MIN,
            gpus_per_node=1,
            cpus_per_task=2,
            slurm_constraint=feature,
        )
        jobs.append(executor.submit(tune, target, folder / f"{feature}.yaml"))
    policies = [str(job.result()) for job in jobs]
    subprocess.run(["amptune", "profile", "build", *policies, "-o", "policy.yaml"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
