"""The commands `amptune profile …`: build and resolve one file for several kinds of GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from amptune.cli.options import FILE, json_option, print_json, say

__all__ = ["profile_group"]


@click.group("profile")
def profile_group() -> None:
    """Build and resolve profiles: one file for several kinds of GPU."""


@profile_group.command("build")
@click.argument("policies", type=FILE, nargs=-1, required=True)
@click.option("-o", "--output", type=FILE, required=True, help="Where the profile is written.")
@json_option
def build_command(policies: tuple[str, ...], output: str, as_json: bool) -> None:
    """Put POLICIES into one profile; each is matched by the GPU it was tuned on."""
    from amptune.errors import FileFormatError, Problem
    from amptune.policy.file_io import load_any, save
    from amptune.policy.profile import Profile, entry_for, taken_before

    if Path(output).resolve() in {Path(path).resolve() for path in policies}:
        raise click.BadParameter(f"{output} is one of the policies, and would be overwritten", param_hint="--output")
    entries, problems = [], []
    for path in policies:
        found = load_any(path)
        entry = None if isinstance(found, Profile) else entry_for(found)
        if entry is None:
            problems.append(
                Problem(message="a profile is built from policies that say where they are valid", source=path)
            )
        else:
            entries.append(entry)
    for earlier, later in [] if problems else taken_before(entries):
        message = f"is for the same machines as {policies[earlier]}: keep one of them"
        problems.append(Problem(message=message, source=policies[later]))
    if problems:
        raise FileFormatError(problems)
    save(Profile(entries=tuple(entries), default=None), output)
    if as_json:
        matches = [dict(entry.match) for entry in entries]
        print_json("amptune.profile-build/1", {"output": output, "entries": matches, "findings": []})
    else:
        say(f"wrote {output}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}")


@profile_group.command("resolve")
@click.argument("file", type=FILE)
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Instead of this machine's labels.")
@json_option
def resolve_command(file: str, labels: tuple[str, ...], as_json: bool) -> None:
    """Show which entry of a profile this machine (or the labels given) would take, and why not the others.

    With --label it answers for another machine, on a login node without a GPU too.
    """
    from amptune.errors import FileFormatError, Problem
    from amptune.policy.file_io import dumps, load_any
    from amptune.policy.profile import Profile, resolve_here
    from amptune.policy.serialization import policy_to_dict

    profile = load_any(file)
    if not isinstance(profile, Profile):
        raise FileFormatError([Problem(message="this is a policy, not a profile", source=str(Path(file)))])
    resolution = resolve_here(profile, _labels(labels))
    if as_json:
        print_json(
            "amptune.profile-resolve/1",
            {
                "entry": resolution.entry,
                "policy": policy_to_dict(resolution.policy_file.policy),
                "rejected": [{"entry": r.entry, "because": list(r.because)} for r in resolution.rejected],
                "findings": [],
            },
        )
        return
    for rejected in resolution.rejected:
        say(f"entry {rejected.entry} does not match: {'; '.join(rejected.because)}", err=True)
    say(f"# entry {resolution.entry}")
    sys.stdout.write(dumps(resolution.policy_file))


def _labels(given: tuple[str, ...]) -> dict[str, str] | None:
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, _) in zip(given, pairs, strict=True):
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not of the form K=V", param_hint="--label")
    return {name: value for name, _, value in pairs} or None
