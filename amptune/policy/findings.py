"""A finding: something noticed and worth reporting, as a value. Report code formats it for output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something noticed: `code` is stable and for programs; `message` is for people and complete by itself.

    `module` is the path of the model's module concerned, if any, and empty for the model itself; `figures` holds the
    numbers behind the message, each with its unit in its name.
    """

    code: str
    message: str
    module: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.message if self.module is None else f"{self.module or 'the model itself'}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding as `--json` prints it: `{code, module, message, …figures}`."""
        return {"code": self.code, "module": self.module, "message": self.message, **self.figures}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Finding:
        """Reads what `as_dict` returns. Raises `AttributeError`, `KeyError` or `TypeError` for anything else."""
        figures = {name: value for name, value in data.items() if name not in ("code", "module", "message")}
        code, message, module = data["code"], data["message"], data.get("module")
        if not all(isinstance(one, str) for one in (code, message, module or "")):
            raise TypeError("a finding's code, message and module are text")
        return Finding(code=code, message=message, module=module, figures=figures)
