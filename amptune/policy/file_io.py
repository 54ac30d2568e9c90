"""Reads, checks and writes policy and profile files. A file is data; nothing in it can run code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from amptune.errors import FileFormatError, OutputError, Problem
from amptune.policy.condition import condition_of
from amptune.policy.policy_file import PolicyFile, is_preset, preset
from amptune.policy.profile import Entry, Profile, resolve_here, useless
from amptune.policy.serialization import (
    POLICY_SCHEMA,
    PROFILE_SCHEMA,
    PolicyDocument,
    ProfileDocument,
    policy_file_from,
    policy_file_to_dict,
)
from amptune.policy.settings import Policy
from amptune.policy.validation import validate
from amptune.policy.yaml_text import Document, dump, read

__all__ = [
    "dumps",
    "load",
    "load_any",
    "parse_policy",
    "require_useful",
    "require_writable",
    "save",
    "write",
    "write_bytes",
]


def load(path: str | os.PathLike[str]) -> PolicyFile:
    """Returns a policy file, a profile's entry that matches this machine, or a preset.

    Presets are `amp-bf16`, `amp-fp16`, `transformers`, and `apex:O0` to `apex:O3`.
    Raises `FileFormatError` with every problem in the file, `HardwareMismatchError` if no entry matches; the default
    does not count if the environment has AMPTUNE_REQUIRE=1.
    """
    found, origin = load_any(path), os.fspath(path)
    if isinstance(found, Profile):
        chosen = resolve_here(found)
        found, origin = chosen.policy_file, f"{origin}, entry {chosen.entry}"
    return replace(found, origin=origin)


def load_any(path: str | os.PathLike[str]) -> PolicyFile | Profile:
    """Returns the file's content, or the preset of that name. Raises `FileFormatError`."""
    return preset(path) if is_preset(path) else parse_policy(read(path))


def parse_policy(document: Document) -> PolicyFile | Profile:
    """Returns the policy or profile that the document's `schema` key declares. Raises `FileFormatError`."""
    if not isinstance(document.data, Mapping):
        raise FileFormatError([document.problem((), "a policy file is a mapping of settings, key: value")])
    schema = document.data.get("schema")
    if schema == POLICY_SCHEMA:
        return policy_file_from(validate(document, PolicyDocument))
    if schema == PROFILE_SCHEMA:
        return _profile_from(document)
    allowed = f"amptune reads {POLICY_SCHEMA} and {PROFILE_SCHEMA}"
    said = "schema: this key is missing" if schema is None else f"schema: {schema!r} is not known"
    raise FileFormatError([document.problem(("schema",), f"{said}; {allowed}")])


def require_useful(profile: Profile, document: Document) -> None:
    """Raises `FileFormatError` with each entry of the profile that no machine takes, and its place in the document."""
    problems = [
        document.problem(("entries", index, "match", *([] if label is None else [label])), f"entry {index}: {why}")
        for index, label, why in useless(profile)
    ]
    if problems:
        raise FileFormatError(problems)


def dumps(content: Policy | PolicyFile | Profile) -> str:
    """Returns the YAML text of a file with this content."""
    if isinstance(content, Policy):
        content = PolicyFile(policy=content)
    if isinstance(content, PolicyFile):
        return dump(policy_file_to_dict(content))
    data: dict[str, Any] = {"schema": PROFILE_SCHEMA, "entries": [_entry_to_dict(entry) for entry in content.entries]}
    if content.default is not None:
        data["default"] = policy_file_to_dict(content.default, schema=False)
    return dump(data)


def save(content: Policy | PolicyFile | Profile, path: str | os.PathLike[str]) -> None:
    """Writes the file completely or not at all. Raises `OutputError` if it cannot be written."""
    write(dumps(content), path)


def write(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a file's text completely or not at all. Raises `OutputError` if it cannot be written."""
    write_bytes(text.encode(), path)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a file's bytes completely or not at all. Raises `OutputError` if it cannot be written."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # a pipe or a terminal cannot be replaced
            target.write_bytes(data)
        else:
            _replace(target.resolve(), data)  # replaces the target of a link, not the link
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises `OutputError` if a file cannot be written there; call this before long work, not after it."""
    target = Path(path)
    folder = target.parent
    if not folder.is_dir():
        raise OutputError(f"{target} cannot be written: there is no folder {folder}")
    if target.is_dir():
        raise OutputError(f"{target} cannot be written: it is a folder")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise OutputError(f"{target} cannot be written: permission denied")


def _replace(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _mode(target: Path) -> int:
    """Returns the old file's mode, else what `open` would give: mkstemp makes private files, policies are shared."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    return {"match": dict(entry.match), "policy": policy_file_to_dict(entry.policy, schema=False)}


def _profile_from(document: Document) -> Profile:
    """Returns the profile. Raises `FileFormatError` with every problem, malformed comparisons included."""
    problems = list(_malformed_comparisons(document))
    try:
        body = validate(document, ProfileDocument)
    except FileFormatError as error:
        problems += error.problems
    if problems:
        raise FileFormatError(sorted(problems, key=lambda p: (p.line or 0, p.column or 0)))
    return Profile(
        entries=tuple(Entry(match=e.match, policy=policy_file_from(e.policy)) for e in body.entries),
        default=None if body.default is None else policy_file_from(body.default),
    )


def _malformed_comparisons(document: Document) -> Iterator[Problem]:
    """Yields a problem for each malformed comparison, whatever else is wrong."""
    entries = document.data.get("entries")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        match = entry.get("match") if isinstance(entry, Mapping) else None
        for name, text in match.items() if isinstance(match, Mapping) else ():
            try:
                condition_of(name, text if isinstance(text, str) else "")
            except ValueError as error:
                yield document.problem(("entries", index, "match", name), f"{name}: {error}")
