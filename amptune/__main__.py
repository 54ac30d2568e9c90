"""The command `amptune`, and `python -m amptune`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits; with exit code 2 if a package that the commands need is missing."""
    signal.signal(signal.SIGINT, _end)  # until the commands have a handler of their own
    if sys.argv[1:2] == ["run"] and not {"-h", "--help"} & set(sys.argv[2:3]):  # it needs no more than training does
        from amptune.runtime.script.under_policy import main as run_script

        run_script(sys.argv[2:])
        return
    from amptune.errors import MissingPackageError, require_tune

    try:
        require_tune()
    except MissingPackageError as error:
        _refuse(str(error))
    from amptune.cli.entry import main as run

    run()


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Ends without a traceback of the imports that are under way."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _refuse(message: str) -> None:
    """Exits as commands do on an error, which is done without click here."""
    import json

    sys.stderr.write(f"error: {message}\n")
    if "--json" in sys.argv:
        finding = {"code": "missing-package", "module": None, "message": message}
        sys.stdout.write(
            json.dumps({"schema": "amptune.error/1", "exit_code": 2, "findings": [finding]}, indent=2) + "\n"
        )
    sys.exit(2)


if __name__ == "__main__":
    main()
