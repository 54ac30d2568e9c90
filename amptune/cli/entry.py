"""The command `amptune`: finds the command asked for, and turns errors into text and exit codes."""

from __future__ import annotations

import codecs
import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from itertools import takewhile
from types import FrameType
from typing import Any, NoReturn, TextIO

import click

import amptune
from amptune import errors
from amptune.cli.options import print_error, say
from amptune.cli.session import Session
from amptune.cli.torchrun import take_over, wait_for_first
from amptune.measure.workers.log_stream import LossyStream

__all__ = ["STARTED", "cli", "exit_code_of", "main"]

# A budget covers the whole command, so its time starts here.
STARTED = time.monotonic()

_COMMANDS = {
    "check": "amptune.cli.files:check_command",
    "diagnose": "amptune.cli.diagnose:diagnose_command",
    "explain": "amptune.cli.files:explain_command",
    "init": "amptune.cli.init:init_command",
    "probe": "amptune.cli.probe:probe_command",
    "profile": "amptune.cli.profile:profile_group",
    "report": "amptune.cli.report:report_command",
    "run": "amptune.cli.run:run_command",
    "schema": "amptune.cli.files:schema_command",
    "tune": "amptune.cli.tune:tune_command",
    "verify": "amptune.cli.verify:verify_command",
}

# Ctrl-C, `kill`, and the end of the terminal.
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
# How a terminal shows what its encoding lacks.
_PLAIN = dict(zip("×…±·µ→•²\N{NO-BREAK SPACE}", ("x", "...", "+-", "-", "u", "->", "*", "^2", " "), strict=True))

_EXIT_CODES: dict[type[errors.AmptuneError], int] = {
    errors.UserCodeError: 1,
    errors.NotMeasuredError: 1,
    errors.NothingFeasibleError: 3,
    errors.HardwareMismatchError: 4,
}


class _LazyGroup(click.Group):
    """A group that imports a command's module on first use, and turns errors into text and exit codes."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command and exits with its code; without `standalone_mode`, returns the code and raises errors."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        own = takewhile(lambda argument: argument != "--", sys.argv[1:] if args is None else args)
        as_json = "--json" in own  # what stands behind `--` is the target's script's
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.exit(code if isinstance(code, int) else 0)
        except click.ClickException as error:
            error.show()
            _end(error.exit_code, "usage", error.format_message(), as_json=as_json)
        except errors.AmptuneError as error:
            say(f"error: {error}", err=True)
            _end(exit_code_of(error), _code_of(error), str(error), as_json=as_json)
        except (KeyboardInterrupt, click.Abort):
            say("interrupted", err=True)
            _end(130, "interrupted", "interrupted", as_json=as_json)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't start new thread" not in str(error):
                raise
            say(f"error: {error}", err=True)
            _end(2, "system", str(error), as_json=as_json)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}; {errors.suggestion(args[0], _COMMANDS)}".rstrip("; "))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(amptune.__version__, prog_name="amptune")
def cli() -> None:
    """Find the fastest numerically safe way to run a PyTorch training step on this machine.

    \b
    amptune tune train.py -- its arguments               measure the script as it is; writes policy.yaml
    amptune run policy.yaml train.py -- its arguments    train under it, without a changed line
    amptune explain policy.yaml                          what was found, in words
    amptune diagnose train.py                            why is it slow, where do NaNs come from?
    amptune verify policy.yaml train.py                  does it still hold?
    amptune init workload.py                             no script: describe a training step

    \b
    In code of your own:
    workload = amptune.Workload.from_loop(model, loader, loss_fn, optimizer)   # to tune
    tuned = amptune.apply("policy.yaml", model)                                # to train

    Exit codes: 0 fine; 1 a claim does not hold, or your code raised; 2 a wrong argument or file;
    3 not even the baseline runs; 4 not valid for this hardware; 130 interrupted.

    Environment: AMPTUNE_GUARD, AMPTUNE_ANY_HARDWARE, AMPTUNE_LABELS, AMPTUNE_REQUIRE; completion: docs/commands.md.
    """  # noqa: D301  # click's mark for lines to be left as they are is the backspace itself


def main() -> None:
    """Runs the command line and exits."""
    codecs.register_error("amptune", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors != "replace":
            stream.reconfigure(errors="amptune")
    job = take_over()
    if job is not None and job.rank > 0:
        wait_for_first()
        return
    for number in _INTERRUPTING:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _interrupt)
    if sys.stderr is not None and sys.platform != "win32":
        sys.stderr = _without_reader(sys.stderr)
    sys.unraisablehook = _raise_again
    _quieten_resource_tracker()
    cli(obj=Session(started=STARTED, torchrun=job))


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Spells what a terminal's encoding lacks, such as that of ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    plain = "".join(_PLAIN.get(one, one) for one in lacking)
    return plain.encode("ascii", "backslashreplace").decode(), error.end


def _quieten_resource_tracker() -> None:
    """Hides warnings about semaphores of ended workers and torch.compile's processes; these are cleaned up anyway."""
    ours = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), ours]))


def exit_code_of(error: errors.AmptuneError) -> int:
    """Returns the exit code of an error: that of the first class here that it is of, else 2 (wrong use)."""
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 2)


def _code_of(error: errors.AmptuneError) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()


def _end(exit_code: int, code: str, message: str, *, as_json: bool) -> NoReturn:
    """Exits with the code; with `--json` an object tells why."""
    if as_json:
        print_error(exit_code, code, message)
    sys.exit(exit_code)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Stops the work at the first signal and ignores later ones, so that results can still be written."""
    for number in _INTERRUPTING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _without_reader(stderr: TextIO) -> TextIO:
    """Returns stderr as a stream that goes on without its reader: `tune 2>&1 | tee log` outlives `tee`."""
    raw = LossyStream(stderr.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stderr.encoding, errors=stderr.errors, line_buffering=True)


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Interrupts anew if the interruption came in a callback or finalizer, from which Python lets no error out.

    The alarm comes when that has ended. Other errors are told as Python tells them.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
