"""The README and the pages under docs/: their code runs, their links lead somewhere, the README stays short.

`make docs` builds the site and holds its links and anchors; here stands what it does not see.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import commands
import pytest
import torch
import yaml
from torch import nn

import amptune
from amptune.policy.file_io import parse_policy
from amptune.policy.settings import KNOBS
from amptune.policy.yaml_text import parse
from amptune.search.space.space_file import parse_space

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
SITE = REPOSITORY / "mkdocs.yml"
HEADS = ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"]

# The README's words, code and table included: those of two to five minutes.
MOST_WORDS = 900


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The page's blocks of code, as (language, code), in their order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(language, code) for language, code in found if not languages or language in languages]


def by_name(page: Path) -> str:
    return page.name


def loader(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(8):
        yield torch.randn(batch_size, 4), torch.randint(2, (batch_size,))


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def names() -> dict[str, object]:
    """What the code of a page may use without saying where it comes from."""
    given = {"model": small_model(), "loader": loader, "loss_fn": nn.functional.cross_entropy, "batch_size": 8}
    return {"amptune": amptune, "torch": torch, "nn": nn, **given}


def write_policy(autocast: str = "bf16") -> None:
    amptune.save(amptune.Policy(autocast=autocast, batch_size=8, accumulate=2), "policy.yaml")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy, a workload and a script, as a reader of the pages has them."""
    monkeypatch.chdir(tmp_path)
    write_policy()
    (tmp_path / "train.py").write_text(blocks(REPOSITORY / "docs" / "quick-start.md", "python")[0][1])
    assert commands.run("init", "workload.py", folder=tmp_path).returncode == 0
    return tmp_path


@pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_python_of_a_page_runs(page: Path) -> None:
    namespace = names()
    for _, code in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)  # noqa: S102  # our own pages


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    """On a simulated machine, and in its time."""
    for _, code in blocks(page, "bash"):
        for line in code.splitlines():
            program, *arguments = line.partition("#")[0].split()
            assert program == "amptune"
            if arguments[-2:] == ["-o", "policy.yaml"]:  # it is the reader's first
                (folder / "policy.yaml").unlink()
            done = commands.run(*arguments, folder=folder, evaluator=commands.Machine())
            assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_files_of_the_pages_are_well_formed() -> None:
    for page in PAGES:
        for _, code in blocks(page, "yaml"):
            (parse_space if "schema: amptune.space/" in code else parse_policy)(parse(code, page.name))


@pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")
@pytest.mark.parametrize(
    ("page", "side"), [(README, "-"), *((page, "+") for page in PAGES if blocks(page, "diff"))], ids=str
)
def test_the_loop_of_a_diff_trains_and_the_readmes_before_it_too(page: Path, side: str) -> None:
    for _, code in blocks(page, "diff"):
        namespace = names()
        before = [weight.detach().clone() for weight in namespace["model"].parameters()]  # type: ignore[attr-defined]
        kept = [line[1:] for line in code.splitlines() if line[:1] in (side, " ")]
        exec("\n".join(kept), namespace)  # noqa: S102  # our own pages
        now = [*namespace["model"].parameters()]  # type: ignore[attr-defined]
        assert any(weight.grad is not None for weight in now) or not all(map(torch.equal, before, now))


@pytest.mark.parametrize("autocast", ["off", "bf16", "fp16"])
def test_the_documented_training_loop_trains_under_every_dtype(autocast: str) -> None:
    write_policy(autocast)
    model = small_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    (loop,) = [code for _, code in blocks(REPOSITORY / "docs" / "training-loop.md", "python") if "enumerate" in code]
    exec(loop, names() | {"model": model, "tuned": amptune.apply("policy.yaml", model)})  # noqa: S102  # our own page
    assert not all(map(torch.equal, before, model.parameters()))


def test_the_table_of_settings_has_every_knob_with_its_values() -> None:
    table = (REPOSITORY / "docs" / "policy-file.md").read_text().partition("| key | values (default first)")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table.partition("\n\n")[0], re.MULTILINE))
    assert rows.keys() == {knob.name for knob in KNOBS}
    for knob in KNOBS:
        if knob.values and "below" not in rows[knob.name]:
            assert rows[knob.name] == ", ".join(f"`{str(value).lower()}`" for value in knob.values)


def test_every_block_of_code_says_its_language() -> None:
    """Else it would not run here. The README's two plain blocks are shell commands that install."""
    openings = [(page.name, fence) for page in PAGES for fence in re.findall(r"^```.*", page.read_text(), re.M)[::2]]
    plain = [name for name, fence in openings if fence == "```"]
    assert plain == ["README.md", "README.md"]
    assert {language for page in PAGES for language, _ in blocks(page)} == {"python", "bash", "yaml", "diff", "text"}


@pytest.mark.parametrize("page", [*PAGES, *(REPOSITORY / name for name in HEADS)], ids=by_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue  # elsewhere; tests use no network
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_short_begins_with_the_two_commands_and_leads_to_the_pages() -> None:
    text = README.read_text()
    assert len(text.split()) <= MOST_WORDS
    beginning = text[: text.index("\n## Will it help me?")]
    assert "make tune" in beginning
    assert "make test" in beginning
    assert "(docs/index.md)" in text  # which the site's nav stands beside


def pages_of(nav: object) -> list[str]:
    """The pages of a site's nav, in their order."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(inner, Iterable)
    return [page for one in inner for page in pages_of(one)]


def test_the_sites_nav_has_every_page_once() -> None:
    (nav,) = re.findall(r"^nav:\n.*", SITE.read_text(), re.DOTALL | re.MULTILINE)
    assert sorted(pages_of(yaml.safe_load(nav)["nav"])) == [page.name for page in PAGES[1:]]


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert "font: false" in SITE.read_text()
    assert "repo_url" not in SITE.read_text()  # GitHub's would be asked for its stars


def test_the_page_of_the_api_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: amptune\.(\w+)$", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(amptune.__all__) - {"__version__"})


def test_the_citation_names_the_authors() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "The amptune authors"}]
