"""The digest of a target's code: measurements made with other code are not used again."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from pathlib import Path

from amptune.workload.targets import Target

__all__ = ["source_digest"]


def source_digest(target: Target) -> str:
    """Returns the SHA-256 of a target's source file and the files beside it that it imports.

    A change makes earlier measurements invalid.
    """
    if target.is_file:
        return _digest_of(Path(target.place))
    spec = importlib.util.find_spec(target.place)
    return _digest_of(Path(spec.origin)) if spec and spec.origin else "unknown"


def _digest_of(path: Path) -> str:
    digest, waiting, seen = hashlib.sha256(), [path], {path}
    while waiting:
        source = waiting.pop().read_bytes()
        digest.update(source)
        beside = [path.parent / f"{name}.py" for name in _imported(source)]
        new = [other for other in dict.fromkeys(beside) if other not in seen and other.is_file()]
        waiting, seen = [*waiting, *new], {*seen, *new}
    return digest.hexdigest()


def _imported(source: bytes) -> list[str]:
    """Returns the first names of the modules that a file imports, sorted."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return sorted({name.partition(".")[0] for name in names})
