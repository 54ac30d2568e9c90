"""What the release workflow asks of the repository and of what it built; each mistake is told, and ends with code 1.

python .github/release.py ready v0.1.0         address, changelog, citation and fallback version fit the tag
python .github/release.py built v0.1.0 dist    one wheel and one source distribution, of the tag's version
python .github/release.py notes v0.1.0         prints the changelog's section of the tag
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLACEHOLDER = "example.invalid"


def section(version: str, changelog: str) -> str:
    """The text below the heading `## 0.1.0`, with a date or a word behind it, up to the next heading of its level."""
    found = re.search(rf"^## {re.escape(version)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def not_ready(version: str, project: str, changelog: str, citation: str) -> list[str]:
    """What has to be done before the version can be released."""
    configuration = tomllib.loads(project)
    fallback = configuration["tool"]["hatch"]["version"]["fallback-version"]
    (address,) = configuration["project"]["urls"].values()
    mistakes = []
    if PLACEHOLDER in address:
        mistakes.append(f"pyproject.toml: {address} is a placeholder: write the project's address")
    if f'url: "{address}"\n' not in citation:
        mistakes.append(f'CITATION.cff: url is not that of pyproject.toml: write url: "{address}"')
    if f"version: {version}\n" not in citation:
        mistakes.append(f"CITATION.cff: version is not that of the tag: write version: {version}")
    if fallback != version:
        mistakes.append(f"pyproject.toml: fallback-version is {fallback}, the tag's version {version}: write that")
    if not section(version, changelog):
        mistakes.append(f"CHANGELOG.md: there is no section '## {version} (YYYY-MM-DD)', or it is empty")
    elif not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        mistakes.append(f"CHANGELOG.md: the heading of {version} has no date: write '## {version} (YYYY-MM-DD)'")
    return mistakes


def not_built(version: str, names: set[str]) -> list[str]:
    """What is wrong with the names of the built files."""
    wanted = {f"amptune-{version}-py3-none-any.whl", f"amptune-{version}.tar.gz"}
    return [] if names == wanted else [f"built {sorted(names)}, not {sorted(wanted)}"]


def main(question: str, tag: str, *folder: str) -> int:
    """Returns the exit code: 1 if there are mistakes."""
    version = tag.removeprefix("v")
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    if question == "notes":
        print(section(version, changelog))
        return 0
    if question == "built":
        mistakes = not_built(version, {path.name for path in Path(*folder).iterdir()})
    else:
        project, citation = ((REPOSITORY / name).read_text() for name in ("pyproject.toml", "CITATION.cff"))
        mistakes = not_ready(version, project, changelog, citation)
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
