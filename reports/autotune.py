"""pytorch-autotune 2.0.0 beside amptune, for the programs here: run alone, given a workload, its answer as a policy.

pip install pytorch-autotune==2.0.0
python reports/autotune.py TARGET --budget 120 --out answer.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amptune.errors import AmptuneError
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    import torch

    from amptune.workload.workload import Workload

# It begins a trial where its budget holds what it expects of one, and does not end it: its own budget is no limit.
AUTOTUNE_MORE_S = 60.0
AUTOTUNE_PATIENCE = 2.5
LOG_CHARACTERS = 4000


# --- from outside ------------------------------------------------------------------------------------------------


def answer_of(command: Sequence[str], answer: Path, log: Path, budget_s: float, left_s: float) -> dict[str, Any] | None:
    """Runs a command that tunes and writes its `answer`; returns that, or how it ended.

    Returns None if the time that was left ended it: another command can let it finish.
    """
    patience_s = AUTOTUNE_PATIENCE * budget_s + AUTOTUNE_MORE_S
    limit_s = min(patience_s, left_s)
    started_s = time.monotonic()
    ended = run_alone(command, log, limit_s)
    seconds = time.monotonic() - started_s
    if ended is None and limit_s < patience_s:
        return None
    found = json.loads(answer.read_text()) if answer.exists() else {}
    tail = log.read_text(errors="replace")[-LOG_CHARACTERS:]
    how = f"ended by force after {limit_s:.0f} s" if ended is None else f"exit code {ended}"
    failure = None if ended == 0 else f"{how}: {last_line(tail)}"
    return {"budget_s": budget_s, "seconds": round(seconds, 1), "failure": failure, "log": tail, **found}


def run_alone(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """The exit code of a process that is ended, with all it started, after the limit: then None."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # this program, with its own arguments
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def policy_of_autotune(config: Mapping[str, Any], *, fused: bool) -> Policy:
    """The policy that comes closest to a configuration of pytorch-autotune 2.0.0.

    It turns TF32 and cudnn.benchmark on for every precision but plain FP32 (tuner.py, `_apply_precision_flags`), and
    fuses only an optimizer that it builds itself: `fused` is what the optimizer it returned says.
    """
    plain = config["precision"] == "fp32_default"
    return Policy(
        autocast={"amp_bf16": "bf16", "amp_fp16": "fp16"}.get(config["precision"], "off"),  # type: ignore[arg-type]
        fp32_math="stock" if plain else "tf32",
        memory_format="channels_last" if config["channels_last"] else "contiguous",
        cudnn_benchmark=not plain,
        compile=config["compile"],
        fused_optimizer=fused,
    )


# --- in its process ----------------------------------------------------------------------------------------------


class Bridged:
    """A workload as pytorch-autotune takes it: a model, an example batch and a loss of the model's output.

    A batch that is a dict goes to the model as it is, since the output then has the loss. Of any other batch, the
    arguments do with which the workload's loss calls its model: one tensor, or several by their names.
    """

    def __init__(self, workload: Workload, batch: Any) -> None:
        self._workload = workload
        self._batch = batch
        self._model = workload.model()
        self._optimizer, self._rate = optimizer_of(workload, self._model)

    @property
    def fuses(self) -> bool:
        """Whether its search can fuse the optimizer: it does if it builds it."""
        return isinstance(self._optimizer, str)

    def search(self, budget_s: float, device: str) -> Any:
        """Returns what pytorch-autotune returns."""
        import pytorch_autotune  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

        return pytorch_autotune.autotune(
            self._model,
            self._given(),
            loss_fn=self._loss(),
            optimizer=self._optimizer,
            lr=self._rate,
            budget=budget_s,
            device=device,
            cache=False,
        )

    def restored(self, config: Mapping[str, Any], device: str) -> Any:
        """Returns what a search that chose `config` returned: it ends in this way, and so does a hit of its cache."""
        from pytorch_autotune import tuner  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

        batch = tuner._Batch.normalize(self._given(), device)
        loss = self._loss() or batch.default_loss_fn()
        model, chosen = self._model.to(device), tuner.TrialConfig.from_dict(dict(config))
        return tuner._finalize(
            model, chosen, tuner.Report({}), batch, loss, self._optimizer, self._rate, device, from_cache=True
        )

    def step(self, result: Any, batch: Any) -> torch.Tensor:
        """Trains one step as pytorch-autotune says, on a batch in the memory format that it chose."""
        import torch

        self._batch = batch
        given = self._given()
        if result.config.channels_last:  # it chooses that for one tensor alone
            given = given.to(memory_format=torch.channels_last)
        loss: torch.Tensor = result.step(given)
        return loss

    def _given(self) -> Any:
        if isinstance(self._batch, dict):
            return self._batch
        args, kwargs = arguments_of_the_model(self._workload, self._batch)
        if len(args) == 1 and not kwargs and hasattr(args[0], "to") and hasattr(args[0], "dim"):
            return args[0]
        return dict(inspect.signature(self._model.forward).bind(*args, **kwargs).arguments)

    def _loss(self) -> Callable[[Any], torch.Tensor] | None:
        if isinstance(self._batch, dict):
            return None
        return lambda output: loss_behind(self._workload, output, self._batch)


class _Seen(Exception):  # noqa: N818  # no error: the way out of a loss function
    """Carries what a model was called with."""


def arguments_of_the_model(workload: Workload, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the workload's loss calls its model with. Raises `AmptuneError` for a step of its own."""

    def look(*args: Any, **kwargs: Any) -> None:
        raise _Seen(args, kwargs)

    if workload.loss is None:
        raise AmptuneError(f"{workload.name}: pytorch-autotune takes no step of one's own")
    try:
        workload.loss(look, batch)  # type: ignore[arg-type]  # no module
    except _Seen as seen:
        args, kwargs = seen.args
        return args, kwargs
    raise AmptuneError(f"{workload.name}: its loss does not call its model")


def loss_behind(workload: Workload, output: Any, batch: Any) -> torch.Tensor:
    """The workload's loss where the model has been run already."""
    return workload.loss(lambda *_, **__: output, batch)  # type: ignore[misc,arg-type]


def optimizer_of(workload: Workload, model: torch.nn.Module) -> tuple[str | Callable[[Any], Any], float]:
    """(the workload's optimizer as pytorch-autotune takes it, its learning rate).

    By name where that means the same, for only then can it be fused; else as it is.
    """
    import torch

    built = workload.optimizer(model)
    rate = float(built.defaults["lr"])
    own = torch.optim.AdamW(model.parameters(), lr=rate)
    if type(built) is torch.optim.AdamW and built.defaults == own.defaults:
        return "adamw", rate
    return lambda _: workload.optimizer(model), rate


def main() -> None:
    """Tunes a target in this process; each trial is printed as it ends, and the answer is written."""
    import torch
    from plain_loop import batches, device_or_default  # beside this program

    from amptune.workload.targets import load_workload, parse_target

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = device_or_default(arguments.device)
    workload = load_workload(parse_target(arguments.target))
    bridged = Bridged(workload, next(batches(workload, device)))
    started_s = time.monotonic()
    result = bridged.search(arguments.budget, device)
    found = {
        "search_s": round(time.monotonic() - started_s, 1),
        "config": result.config.to_dict(),
        "fused": bool(result.optimizer.defaults.get("fused")),
        "fuses": bridged.fuses,
        "report": result.report.to_dict(),
    }
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
