"""`amptune run`: a training script, unchanged, under a policy. It needs what training under a policy needs, no more."""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from amptune.changes.flags import take_defaults
from amptune.errors import AmptuneError, HardwareMismatchError, PolicyApplyError
from amptune.policy.settings import Loader, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.optimizer import lay_out_state
from amptune.runtime.policy_argument import read_policy
from amptune.runtime.script.hooks import LedIterator, Listener, ScriptHooks
from amptune.runtime.script.in_place import InPlace
from amptune.runtime.script.loaders import options_of
from amptune.runtime.script.main_script import run_as_main
from amptune.runtime.script.scaling import Scaling
from amptune.runtime.script.script_training import Iteration, ScriptTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.policy.policy_file import PolicyFile
    from amptune.runtime.tuned import Tuned

__all__ = ["ScriptUnderPolicy", "main", "run_script"]


class ScriptUnderPolicy(Listener):
    """A script whose training a policy is applied to: after its first step, which shows what it trains, or around DDP.

    `tell` gets what was done, in a line, and what of the script's own that replaces.
    """

    def __init__(self, policy: Policy | PolicyFile, tell: Callable[[str], object]) -> None:
        settings = policy if isinstance(policy, Policy) else policy.policy
        if settings.weights == "half" or settings.float8_modules:
            raise PolicyApplyError(
                "half weights and FP8 come before the optimizer, which a script that runs unchanged has by then: "
                "write amptune.apply(…) into it"
            )
        self._policy, self._settings, self._tell = policy, settings, tell
        self._now, self._replaced = Iteration(), dict[str, None]()
        self._tuned: Tuned | None = None
        self._is_applying = False
        self._scaling = Scaling()
        self._served: set[torch.optim.Optimizer] = set()
        self._called: Sequence[nn.Module] = ()
        self._hooks = ScriptHooks(self)
        self._hooks.watch_modules()
        self._hooks.replace(DistributedDataParallel, "__init__", self._before_ddp)
        if settings.loader is not None:
            self._hooks.replace(DataLoader, "__init__", self._built_with(settings.loader))

    def _before_ddp(self, own: Any) -> Any:
        """Applies the policy to a model before DistributedDataParallel lays its gradients out."""

        def __init__(ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it is that
            self._now.modules[module] += 1
            if self._tuned is None:
                self._apply([module])
            else:
                self._tell_of_others()
            own(ddp, module, *args, **kwargs)

        return __init__

    def _built_with(self, settings: Loader) -> Callable[[Any], Any]:
        """Returns what builds DataLoaders of the script's with these settings."""

        def wrapper(own: Any) -> Any:
            signature = inspect.signature(own)

            def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                given = signature.bind(loader, *args, **kwargs).arguments
                options = options_of(settings, given["dataset"], given.get("num_workers", 0))
                own(**{**given, **options})

            return __init__

        return wrapper

    @property
    def is_applied(self) -> bool:
        return self._tuned is not None

    def is_script(self) -> bool:
        return not self._is_applying

    def batch(self, loader: Any, own: LedIterator) -> Any:  # noqa: ARG002
        return own.draw()

    def draws_later(self) -> bool:
        return False

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if not any(one.requires_grad for one in module.parameters()):
            return
        self._now.modules[module] += 1
        if self._now.optimizers:
            self._apply(ScriptTraining.of(self._now, ()).called)

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        run(self._scaling.scaled(loss))

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        if self._tuned is None:
            self._now.optimizers.append(optimizer)
        elif optimizer not in self._served:
            self._serve(optimizer)

    def scaler(self, scaler: Any) -> None:
        if self._scaling.of_script is None:
            self._scaling.of_script = scaler
            if scaler.is_enabled():
                self._replaced["loss scaler"] = None
            if self._tuned is not None:
                self._scaling.begin(self._settings, ())

    def leaves_out_autocast(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        self._replaced["autocast"] = None
        return self._tuned is not None

    def leaves_out_compile(self, mode: str) -> bool:  # noqa: ARG002
        self._replaced["torch.compile"] = None
        return True

    def schedules(self) -> bool:
        return True

    def _apply(self, called: Sequence[nn.Module]) -> None:
        self._called = called
        self._is_applying = True
        try:
            take_defaults()
            model = ScriptTraining(called=called, optimizers=(), iteration=self._now, loaders=()).model
            self._tuned = apply(self._policy, model, guard=False)
            InPlace(self._tuned, called)
            self._scaling.begin(self._settings, [*model.parameters()])
            for optimizer in self._now.optimizers:
                self._serve(optimizer)
        finally:
            self._is_applying = False
        self._hooks.watch_no_modules()
        names = " and ".join(dict.fromkeys(type(one).__name__ for one in called))
        own = f", in place of its own {' and '.join(self._replaced)}" if self._replaced else ""
        loaders = f"; DataLoaders have {self._settings.loader}" if self._settings.loader is not None else ""
        self._tell(f"{replace(self._settings, batch_size=None, loader=None)} around {names}{own}{loaders}")
        self._tell_of_others()

    def _tell_of_others(self) -> None:
        for module in self._now.modules.keys() - self._called:
            self._called = [*self._called, module]  # told once
            self._tell(f"another {type(module).__name__} runs as it is: the policy is for one model")

    def _serve(self, optimizer: torch.optim.Optimizer) -> None:
        self._served.add(optimizer)
        if self._tuned is not None:
            lay_out_state(optimizer)
            self._tuned.optimizer(optimizer)


def run_script(policy: str, path: Path, arguments: Sequence[str], tell: Callable[[str], object]) -> None:
    """Runs a script as `python PATH ARGUMENTS` does, its training under the policy. Raises `AmptuneError`."""
    if not path.is_file():
        raise PolicyApplyError(f"there is no script {path} (looked in {Path.cwd()})")
    listener = ScriptUnderPolicy(read_policy(policy), tell)
    try:
        run_as_main(path, arguments)
    finally:
        if not listener.is_applied:
            tell(f"{path.name} made no step with a module and an optimizer: the policy was not applied")


def main(argv: Sequence[str]) -> None:
    """Runs `amptune run` with these arguments, and exits."""
    parser = argparse.ArgumentParser(
        "amptune run",
        description="Train as SCRIPT.py does, under a policy, without a changed line. What stands behind the script "
        "are its own arguments.",
    )
    parser.add_argument("policy", metavar="POLICY.yaml")
    parser.add_argument("script", metavar="SCRIPT.py", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="[--] ARGUMENTS")
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = asked.arguments[1:] if asked.arguments[:1] == ["--"] else asked.arguments
    try:
        run_script(asked.policy, asked.script, own, lambda words: sys.stderr.write(f"amptune: {words}\n"))
    except AmptuneError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(4 if isinstance(error, HardwareMismatchError) else 2)
