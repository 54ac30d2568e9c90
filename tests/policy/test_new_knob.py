"""A knob is one file: a copy of amptune gets one more, and everything that knows knobs knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

KNOB = '''
"""Which kernels compute attention."""

from __future__ import annotations

from typing import Literal, get_args

from amptune.policy.knobs.knob import Knob, Model, Undo

Kernels = Literal["stock", "math"]


def _apply(kernels: Kernels, model: Model) -> Undo:
    import torch

    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(kernels != "math")
    return lambda: torch.backends.cuda.enable_flash_sdp(before)


KERNELS = Knob(
    name="kernels",
    stock="stock",
    values=get_args(Kernels),
    conflict=lambda policy: policy.weights == "half" and f"kernels: it is for FP32 weights, not {policy.weights}",
    memory="rest",
    matters=lambda value, subject: value == "stock" or bool(subject.convolution_dims),
    apply=_apply,
    words="{} kernels",
    sentences={"math": "kernels math: it is computed by plain matrix products."},
)
'''
# What `settings.py` gets: an import, a place in the registry, a field.
LINES = {
    "from amptune.policy.knobs.autocast": "from amptune.policy.knobs.kernels import KERNELS, Kernels\n",
    "    FUSED_OPTIMIZER,\n": "    KERNELS,\n",
    "    fused_optimizer: bool": '    kernels: Kernels = "stock"\n',
}
SPACE = """
schema: amptune.space/1
architecture: mine
compute_capability: []
extends: hopper
knobs: {kernels: [stock, math]}
"""
USE = """
from dataclasses import replace
from pathlib import Path
import pytest, torch, yaml
import amptune, commands
from amptune.errors import FileFormatError
from amptune.policy import setting_effects as effects
from amptune.policy.serialization import schema_of
from amptune.policy.settings import STOCK, Policy
from amptune.policy.yaml_text import parse
from amptune.policy.file_io import parse_policy
from amptune.report.explanation import explain
from amptune.search.table.ablation import variants_of
from amptune.search.table.verdict import departure_count
from simulated.recorded import recorded_ms

here, policy = Path.cwd(), Policy(autocast="bf16", kernels="math")

# a file and its schema
amptune.save(policy, "by_hand.yaml")
assert "kernels: math" in Path("by_hand.yaml").read_text()
assert amptune.load("by_hand.yaml").policy == policy
for wrong, said in (("kernels: mahts", "is not one of stock, math"), ("weights: half\\nkernels: math", "FP32 weights")):
    with pytest.raises(FileFormatError, match=said):
        parse_policy(parse(f"schema: amptune.policy/1\\n{wrong}", "x.yaml"))
assert schema_of("policy")["properties"]["kernels"]["enum"] == ["stock", "math"]

# training
tuned = amptune.apply(policy, torch.nn.Linear(3, 3))
assert not torch.backends.cuda.flash_sdp_enabled()
tuned.undo()
assert torch.backends.cuda.flash_sdp_enabled()

# words, effects, what it buys
assert str(policy) == "bf16, math kernels"
assert "kernels math: it is computed by plain matrix products." in explain(amptune.load("by_hand.yaml"))
assert effects.numerics_of(policy) == policy and effects.tensors_of(policy) == Policy(autocast="bf16")
assert effects.process_of(policy) == effects.process_of(STOCK) and departure_count(policy) == 2
assert [(one.setting, one.reverted_to) for one in variants_of(policy)] == [("autocast", "off"), ("kernels", "stock")]
assert variants_of(policy)[0].policy == Policy(kernels="math")

# a search, and what it writes
def run(*arguments):
    ms = lambda one: recorded_ms("resnet50", one) * (0.7 if one.kernels == "math" else 1)
    return commands.run(*arguments, folder=here, evaluator=commands.Machine(true_ms=ms))

tune = "tune", "amptune.workload.zoo:resnet50", "--budget", "200s", "--no-compile"
tuned = run(*tune, "--space", "space.yaml", "--study", "study", "-o", "policy.yaml")
found = amptune.load("policy.yaml")
assert found.policy.kernels == "math" and found.evidence["ablation"]["kernels"]["buys"] > 1.2, tuned.stdout
assert "math kernels" in run("report", "study").stdout
run(*tune, "--space", "space.yaml", "--set", "kernels=stock", "-o", "pinned.yaml")
assert amptune.load("pinned.yaml").policy.kernels == "stock"
assert "'kernels' is no knob of this search" in run(*tune, "--set", "kernels=math").stderr
print("all of it")
"""


def test_a_new_knob_is_one_file_and_its_lines_beside_policy(tmp_path: Path) -> None:
    for part in ("amptune", "search_spaces"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "amptune" / "policy" / "knobs" / "kernels.py").write_text(KNOB)
    (tmp_path / "space.yaml").write_text(SPACE)
    settings = tmp_path / "amptune" / "policy" / "settings.py"
    text = settings.read_text()
    for behind, line in LINES.items():
        assert text.count(behind) == 1
        text = text.replace(behind, line + behind)
    settings.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, REPOSITORY / "tests", *sys.path]))}
    program = [sys.executable, "-W", "error", "-c", USE]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "all of it\n", done.stderr
