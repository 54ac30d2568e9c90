"""A finding: something noticed and worth saying, as a value. Words are rendered last, by `amptune.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was noticed: `code` is stable and for programs, `message` is for people and stands alone.

    `module` is the path of the module it concerns; `figures` holds the numbers behind the message, each
    with its unit in its name.
    """

    code: str
    message: str
    module: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.message if self.module is None else f"{self.module}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """The finding as `--json` prints it: `{code, module, message, …figures}`."""
        return {"code": self.code, "module": self.module, "message": self.message, **self.figures}
