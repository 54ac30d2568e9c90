"""The commands about files: `amptune check`, `amptune explain`, `amptune schema`."""

from __future__ import annotations

import json

import click

from amptune.cli.options import FILE, json_option, print_json, say
from amptune.policy.findings import Finding

__all__ = ["check_command", "check_file", "explain_command", "schema_command"]


@click.command("check", short_help="Is a policy, profile or space well formed, and valid here?")
@click.argument("files", type=FILE, nargs=-1, required=True, metavar="FILE...")
@click.option("--any-hardware", is_flag=True, help="Do not ask whether it is valid on this machine.")
@json_option
def check_command(files: tuple[str, ...], any_hardware: bool, as_json: bool) -> None:
    """Is each FILE (a policy, profile or search space) well formed, and valid on this machine?

    Ends at the first that is not: with 2 if it is malformed, with 4 if it is not valid here.
    --json prints an object for each file.
    """
    for file in files:
        kind, findings = check_file(file, any_hardware=any_hardware)
        if as_json:
            print_json("amptune.check/1", {"file": file, "kind": kind, "findings": [f.as_dict() for f in findings]})
            continue
        for finding in findings:
            say(f"note: {finding}", err=True)
        is_valid_here = not any_hardware and kind != "search space"  # one of another GPU can be searched anywhere
        say(f"{file}: a well-formed {kind}" + (", valid here" if is_valid_here else ""))


@click.command("explain", short_help="Say in words what a policy sets, and why.")
@click.argument("file", type=FILE)
@json_option
def explain_command(file: str, as_json: bool) -> None:
    """Say in words what each setting of a policy does and why it is there."""
    from amptune.policy.file_io import load
    from amptune.report.explanation import explain

    parts = explain(load(file))
    if as_json:
        sentences = [sentence for said in parts.values() for sentence in said]
        print_json("amptune.explain/1", {"file": file, "sentences": sentences, "parts": dict(parts), "findings": []})
    else:
        say("\n\n".join("\n".join([heading, *(f"  {one}" for one in said)]) for heading, said in parts.items()))


@click.command("schema", short_help="Print the JSON Schema of a file format.")
@click.argument("kind", type=click.Choice(["policy", "profile", "space"]))
@json_option
def schema_command(kind: str, as_json: bool) -> None:  # noqa: ARG001  # JSON it is in any case
    """Print the JSON Schema of a file format, for an editor or another checker."""
    if kind == "space":
        from amptune.search.space.space_file import space_schema

        schema = space_schema()
    else:
        from amptune.policy.serialization import schema_of

        schema = schema_of("policy" if kind == "policy" else "profile")
    click.echo(json.dumps(schema, indent=2))


def check_file(path: str, *, any_hardware: bool = False) -> tuple[str, tuple[Finding, ...]]:
    """Returns (kind of file, notes).

    Raises `FileFormatError` if it is malformed, `HardwareMismatchError` if it is not valid here, unless `any_hardware`.
    """
    from amptune.hardware.detect import probe
    from amptune.policy.file_io import load_any, parse_policy, require_useful
    from amptune.policy.hardware_match import require_valid
    from amptune.policy.policy_file import is_preset
    from amptune.policy.profile import Profile, resolve_here
    from amptune.policy.yaml_text import read

    document = None if is_preset(path) else read(path)
    if document is None:
        found = load_any(path)
    else:
        schema = document.data.get("schema") if isinstance(document.data, dict) else None
        if isinstance(schema, str) and schema.startswith("amptune.space/"):
            from amptune.search.space.space_file import parse_space

            parse_space(document)
            return "search space", ()
        found = parse_policy(document)
    if isinstance(found, Profile) and document is not None:
        require_useful(found, document)
    kind = "profile" if isinstance(found, Profile) else "policy"
    if any_hardware:
        return kind, ()
    notes: tuple[Finding, ...] = ()
    if isinstance(found, Profile):
        chosen = resolve_here(found)
        found, figures = chosen.policy_file, {"entry": chosen.entry}
        notes = (Finding(code="entry", message=f"entry {chosen.entry} matches here", figures=figures),)
    return kind, (*notes, *require_valid(found, dict(probe().labels)))
