"""The command `amptune`, and `python -m amptune`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits; with exit code 2 if a package that only the commands need is missing."""
    try:
        from amptune.cli.entry import main as run

        run()
    except ModuleNotFoundError as error:
        from amptune.errors import MissingPackageError

        missing = MissingPackageError.of(error)
        if missing is None:
            raise
        sys.stderr.write(f"error: {missing}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
