"""Checks that a file of any of amptune's three kinds is well formed and valid on this machine."""

from __future__ import annotations

from amptune.policy.findings import Finding

__all__ = ["check_file"]


def check_file(path: str) -> tuple[str, tuple[Finding, ...]]:
    """Returns (kind of file, notes). Raises `FileFormatError` if malformed, `HardwareMismatchError` if invalid here."""
    from amptune.policy.policy_file import is_preset
    from amptune.policy.yaml_text import read

    if is_preset(path):
        return _check_policy_or_profile(path)
    data = read(path).data
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, str) and schema.startswith("amptune.space/"):
        return "search space", _check_space(path)
    return _check_policy_or_profile(path)


def _check_space(path: str) -> tuple[Finding, ...]:
    from amptune.search.space.space_file import load_space

    load_space(path)
    return ()


def _check_policy_or_profile(path: str) -> tuple[str, tuple[Finding, ...]]:
    from amptune.hardware.detect import probe
    from amptune.policy.file_io import load_any
    from amptune.policy.hardware_match import require_valid
    from amptune.policy.profile import Profile, resolve

    found = load_any(path)
    labels = dict(probe().labels)
    if isinstance(found, Profile):
        chosen = resolve(found, labels)
        note = Finding(code="entry", message=f"entry {chosen.entry} matches here", figures={"entry": chosen.entry})
        return "profile", (note, *require_valid(chosen.policy_file, labels))
    return "policy", require_valid(found, labels)
