"""Tables and findings as they stand on a terminal, and in a pipe."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminals import BERT_RULES, Terminal, decision_of, with_rules

from amptune.policy.settings import Policy
from amptune.report.terminal import print_decision, print_findings
from amptune.report.text_table import TextRow, TextTable
from amptune.search.table.objective import Objective

RULES = str(Policy(autocast="bf16", fp32_modules=BERT_RULES))


@pytest.mark.parametrize("objective", ["throughput", "memory", "energy"])
def test_at_80_columns_the_tables_of_a_bert_with_rules_are_readable(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = with_rules(decision_of(tmp_path, Objective(objective)))  # type: ignore[arg-type]
    terminal = Terminal(monkeypatch, 80)
    print_decision(decision, "policy.yaml", terminal, verbose=True)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("winner") for line in lines)
    words = terminal.getvalue().split()
    for rule in BERT_RULES[:4]:
        assert str(rule) in words  # whole, not a letter a line
    heading = next(line for line in lines if "ms/step" in line)
    winner = next(place for place, line in enumerate(lines) if line.startswith("winner"))
    figures = next(line for line in lines[winner:] if re.search(r"\d×$", line))
    assert len(figures) == len(heading)  # below each other


def test_a_pipe_gets_the_width_of_its_content(tmp_path: Path) -> None:
    stream, decision = io.StringIO(), with_rules(decision_of(tmp_path))
    print_decision(decision, "policy.yaml", stream, verbose=True)
    print_findings(decision, stream, verbose=True)
    lines = stream.getvalue().splitlines()
    assert any(str(decision.verdict.winner.policy) in line and "×" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)
    for finding in decision.findings:
        assert f"• {finding}" in lines


def test_the_winner_is_coloured_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = decision_of(tmp_path)

    def printed(stream: io.StringIO) -> str:
        print_decision(decision, "policy.yaml", stream, verbose=True)
        return stream.getvalue()

    lines = printed(Terminal(monkeypatch, 200, term="xterm-256color")).splitlines()
    first, *others = [line for line in lines if line.startswith("\x1b[1;32m")]
    assert first.startswith(f"\x1b[1;32m{decision.winner}: ")
    assert all("winner" in line for line in others)
    assert "\x1b" not in printed(io.StringIO())
    plain = Terminal(monkeypatch, 200, term="xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(plain)


def test_a_table_is_one_line_a_row_where_it_fits_and_else_folded() -> None:
    rows = (
        TextRow(name="winner", figures=("1.0", "2.0"), policy=RULES, wins=True),
        TextRow(name="baseline", figures=("oom",), policy="stock PyTorch"),
    )
    table = TextTable(title="a title", headings=("ms/step", "speed"), rows=rows)
    wide = [line.text for line in table.lines(None)]
    assert wide[1].split() == ["ms/step", "speed", "policy"]
    assert wide[2] == f"winner        1.0    2.0  {RULES}"
    assert wide[3] == "baseline      oom         stock PyTorch"
    assert [line.text for line in table.lines(400)] == wide
    folded = [line.text for line in table.lines(60)]
    assert folded[1] == "  ms/step  speed"
    assert folded[-2:] == ["baseline: stock PyTorch", "      oom"]
    narrow = " ".join(line.text for line in table.lines(12))
    assert "ms/step 1.0, speed 2.0" in " ".join(narrow.split())


@given(st.integers(20, 200), st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"])), max_size=9))
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_lost(width: int, words: list[str]) -> None:
    row = TextRow(name="winner", figures=("12.345", "11.000-13.000", "2.35×"), policy=" ".join(words))
    table = TextTable(title="title", headings=("ms/step", "95 %", "vs. baseline"), rows=(row,), note=f"{RULES}.")
    lines = [line.text for line in table.lines(width)]
    assert max(map(len, lines)) <= width
    assert all(any(figure in line for line in lines) for figure in row.figures)
