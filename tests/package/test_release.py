"""A release: the workflow's questions to the repository, the project's address, pinned actions, issue forms."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import commands
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
GITHUB = REPOSITORY / ".github"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
FALLBACK = PROJECT["tool"]["hatch"]["version"]["fallback-version"]
(ADDRESS,) = PROJECT["project"]["urls"].values()

_spec = spec_from_file_location("release", GITHUB / "release.py")
assert _spec is not None
assert _spec.loader is not None
release = module_from_spec(_spec)
_spec.loader.exec_module(release)

READY = (
    '[project.urls]\nRepository = "https://a.b/c"\n[tool.hatch.version]\nfallback-version = "0.2.0"\n',
    "# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2027-01-02)\n\n- new\n\n## 0.1.0 (2026-12-01)\n\n- old\n",
    'version: 0.2.0\nurl: "https://a.b/c"\n',
)


def test_a_release_whose_files_fit_the_tag_is_ready_and_has_its_section_of_the_changelog() -> None:
    assert release.not_ready("0.2.0", *READY) == []
    assert release.section("0.2.0", READY[1]) == "- new"
    assert release.not_built("0.2.0", {"amptune-0.2.0-py3-none-any.whl", "amptune-0.2.0.tar.gz"}) == []


@pytest.mark.parametrize(
    ("place", "old", "new", "said"),
    [
        (0, "a.b/c", "example.invalid/c", "pyproject.toml: https://example.invalid/c is a placeholder"),
        (2, "a.b/c", "a.b/d", 'CITATION.cff: url is not that of pyproject.toml: write url: "https://a.b/c"'),
        (2, "0.2.0", "0.1.0", "CITATION.cff: version is not that of the tag: write version: 0.2.0"),
        (
            0,
            "0.2.0",
            "0.1.0",
            "pyproject.toml: fallback-version is 0.1.0, the tag's version 0.2.0: write that",
        ),
        (1, "- new", "", "CHANGELOG.md: there is no section '## 0.2.0 (YYYY-MM-DD)', or it is empty"),
        (1, "2027-01-02", "unreleased", "CHANGELOG.md: the heading of 0.2.0 has no date"),
    ],
)
def test_a_release_is_refused_with_what_to_write_where(place: int, old: str, new: str, said: str) -> None:
    files = list(READY)
    files[place] = files[place].replace(old, new)
    assert any(said in mistake for mistake in release.not_ready("0.2.0", *files))


def test_the_fallback_version_is_the_citations_and_the_changelogs_newest() -> None:
    newest = re.search(
        r"^## ([\d.]+\w*) \((unreleased|\d{4}-\d\d-\d\d)\)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M
    )
    assert newest is not None
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == FALLBACK
    assert newest[1] == FALLBACK or newest[2] == "unreleased"


def test_the_projects_address_stands_in_pyproject_and_the_citation_alone() -> None:
    """Another file that names a host of amptune's would be forgotten when the address is filled in."""
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["url"] == ADDRESS
    patterns = (ADDRESS, r"https?://[^\s)\"']*/amptune\b", r"(github|gitlab)\.(com|io)/[\w-]+/amptune\b")
    folders = ("amptune", "docs", "examples", "search_spaces", ".github")
    files = [path for name in folders for path in (REPOSITORY / name).rglob("*") if path.suffix in TEXTS]
    files += [path for path in REPOSITORY.iterdir() if path.suffix in TEXTS or path.name == "Makefile"]
    found = [path.name for path in files if any(re.search(one, path.read_text()) for one in patterns)]
    assert sorted(found) == ["CITATION.cff", "pyproject.toml"]


TEXTS = {".py", ".md", ".txt", ".yaml", ".yml", ".toml", ".cff", ".html", ".ipynb"}


@pytest.mark.parametrize("workflow", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_is_yaml_and_pins_its_actions_by_commit_with_the_version_beside(workflow: Path) -> None:
    text = workflow.read_text()
    assert yaml.safe_load(text)["jobs"]
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)] == []


@pytest.mark.parametrize("form", ["slower-than-promised", "bug", "question"])
def test_a_form_asks_for_the_output_of_commands_that_exist(form: str) -> None:
    content = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert {"name", "description", "body"} <= content.keys()
    fields = [one for one in content["body"] if one["type"] != "markdown"]
    assert len({one["id"] for one in fields}) == len(fields)
    labels = [one["attributes"]["label"] for one in fields]
    asked = [re.findall(r"[\w-]+", label)[1] for label in labels if re.match(r"amptune \w", label)]
    assert "probe" in asked
    for command in asked:
        done = commands.run(command, "--help", folder=REPOSITORY)
        assert done.returncode == 0
        assert "--json" in done.stdout


def test_the_version_of_a_build_is_the_newest_tags(tmp_path: Path) -> None:
    """By the options that pyproject.toml gives to the build backend."""
    scm = pytest.importorskip("setuptools_scm", reason="comes with the build backend, not with the extra `test`")
    options = PROJECT["tool"]["hatch"]["version"]

    def version() -> str:
        found = scm.get_version(root=tmp_path, fallback_version=FALLBACK, **options["raw-options"])
        return str(found)

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)  # noqa: S607

    assert version() == FALLBACK
    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert version() == FALLBACK
    git("tag", "v7.0.0")
    git("commit", "--allow-empty", "-m", "two")
    assert version() == "7.0.0"
