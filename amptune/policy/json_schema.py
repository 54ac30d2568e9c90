"""JSON Schemas (draft 2020-12) of the file formats, generated from the types that validate the files."""

from __future__ import annotations

from typing import Any, Literal

from amptune.policy.wire import PolicyDocument, ProfileDocument, adapter_for

__all__ = ["schema_of"]

_KINDS = {"policy": PolicyDocument, "profile": ProfileDocument}


def schema_of(kind: Literal["policy", "profile"]) -> dict[str, Any]:
    """Returns the JSON Schema of a policy or a profile file."""
    schema: dict[str, Any] = adapter_for(_KINDS[kind]).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"amptune {kind}", **schema}
