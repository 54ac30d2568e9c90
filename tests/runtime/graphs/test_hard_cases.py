"""Hard cases for recorded passes: each does what it tells of itself, on a tape or, on a GPU, by the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hard_cases import CASES
from hard_cases.trial import is_expected, row_of
from taped import TapeRecorder

from amptune.runtime.graphs.graphed_model import GraphedModel

CPU = torch.device("cpu")
ON_TAPE = [name for name, case in CASES.items() if not (case.gpu or case.package or case.on_cpu is None)]


# CUDA refuses to be used beside a thread that records: who comes first differs from run to run.
RACES = "thread_synchronizes_beside", "thread_two_models"


def on_tape(model: torch.nn.Module, say: object) -> GraphedModel:
    return GraphedModel(model, say, recorder=TapeRecorder, device_type="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ON_TAPE)
def test_a_case_is_the_same_or_says_why_not(name: str) -> None:
    row = row_of(CASES[name], CPU, on_tape) | {"device": "cpu"}
    assert is_expected(row, CASES[name]), row


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cases_do_the_same_on_a_gpu(tmp_path: Path) -> None:
    program = Path(__file__).parents[3] / "reports" / "graph_cases.py"
    command = [sys.executable, str(program), "--jobs", "8", "--out", str(tmp_path / "cases.jsonl")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    others = [line for line in said.splitlines() if line.startswith("not expected:")]
    others = [line for line in others if not any(name in line for name in RACES)]
    assert others == [], said
