"""A small table of HTML, by which a notebook shows a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["notebook_html", "settings_in_rows"]


def settings_in_rows(policy: Policy) -> dict[str, Any]:
    """Returns the settings that differ from stock PyTorch, by name, or a row that says that none does."""
    return dict(policy.departures()) or {"policy": str(policy)}


def notebook_html(title: str, rows: Mapping[str, Any], findings: Iterable[Finding | str] = ()) -> str:
    """Returns a table, a row for each name with its value (left out if it has none), and a list of the findings."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{_in_words(value)}</td></tr>'
        for name, value in rows.items()
        if value not in (None, "", (), [])
    )
    items = "".join(f"<li>{escape(str(finding))}</li>" for finding in findings)
    said = f"<ul>{items}</ul>" if items else ""
    return f"<div><strong>{escape(title)}</strong><table>{cells}</table>{said}</div>"


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "<br>".join(escape(str(item)) for item in value)
    return escape(str(value))
