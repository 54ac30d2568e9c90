"""Files of evidence that grow by a line of JSON as each thing is done."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, data: Mapping[str, Any]) -> None:
    """Adds a line behind the last whole one. Programs that add to one file wait for one another."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(data).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
