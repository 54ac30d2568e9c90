"""What a tuner's process compiled, found again by training. Graphs are compiled for this machine's CPU, for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import WORKLOADS
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Measurement
from amptune.measure.workers.source import Source
from amptune.measure.workers.worker import A_FEW_STEPS
from amptune.policy.artifact_file import ArtifactFile, beside, kept_in
from amptune.policy.file_io import save
from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")

COMPILED = Policy(autocast="bf16", compile="default", fp32_modules=(Fp32Rule(path="2"),))
# PyTorch would compile programs for eight seconds to see which vector instructions there are.
QUICK = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}

TRAINING = """
import json, os
from pathlib import Path
import torch
import amptune
from torch import nn
from torch._dynamo.utils import counters

def objects():
    return set(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))

def is_kernel(built):  # others show which vector instructions there are
    return "chk_kernel" not in built.with_suffix(".cpp").read_text()

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
tuned = amptune.apply("policy.yaml", model, artifacts=True)
placed = objects()
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters()))
step = tuned.training_step(lambda one, batch: nn.functional.cross_entropy(one(batch[0]), batch[1]), optimizer)
for _ in range(3):
    step((torch.randn(16, 64), torch.randint(8, (16,))))
compiled = sum(map(is_kernel, objects() - placed))
print(json.dumps({**counters["inductor"], **counters["aot_autograd"], "compiled_kernels": compiled}))
"""


@pytest.fixture(scope="module")
def tuned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy and what a worker kept of it beside."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "train.py").write_text(WORKLOADS)
    source, kept = Source(target=f"{folder}/train.py:small"), folder / "kept"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUICK, "TORCHINDUCTOR_CACHE_DIR": str(folder / "graphs")}.items():
            patch.setenv(name, value)
        with WorkerEvaluator(source, "cpu", folder / "log", artifacts=kept) as evaluator:
            for policy in (COMPILED, Policy()):
                outcome = evaluator.measure(policy, replace(A_FEW_STEPS, time_limit_s=300.0))
                assert isinstance(outcome, Measurement), outcome
    assert list(kept.iterdir()) == [kept_in(kept, COMPILED)]
    save(COMPILED, folder / "policy.yaml")
    shutil.copy(kept_in(kept, COMPILED), beside(folder / "policy.yaml"))
    return folder


@pytest.fixture
def folder(tuned_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and an empty cache of torch.compile."""
    for name in ("policy.yaml", "policy.yaml.artifacts"):
        shutil.copy(tuned_folder / name, tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def net() -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    torch.compiler.reset()


def loaded(folder: Path) -> set[str]:
    """What lies in the cache of torch.compile."""
    names = {path.name for path in (folder / "cache").glob("*")}
    return names & {"fxgraph", "aotautograd"}


@pytest.mark.parametrize("artifacts", [False, True, "policy.yaml.artifacts", Path("policy.yaml.artifacts")])
def test_what_fits_and_was_asked_for_is_loaded_without_a_word(folder: Path, net: nn.Module, artifacts: Any) -> None:
    given = artifacts if isinstance(artifacts, bool) else folder / artifacts
    with apply(folder / "policy.yaml", net, artifacts=given) as tuned:  # warnings are errors here
        assert tuned.findings == ()
    assert loaded(folder) == ({"fxgraph", "aotautograd"} if artifacts else set())


def rewrite(path: Path, **parts: Any) -> None:
    path.write_bytes(replace(ArtifactFile.from_bytes(path.read_bytes()), **parts).to_bytes())


def with_facts(**facts: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, fits={**ArtifactFile.from_bytes(path.read_bytes()).fits, **facts})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_facts(torch="2.0.1"), f"does not fit (torch was 2.0.1 and is {torch.__version__})"),
        (with_facts(device="a Z80, DEFAULT"), "does not fit (device was a Z80, DEFAULT and is "),
        (with_facts(kind="cuda", device="NVIDIA H200, compute capability 9.0"), "does not fit (device was NVIDIA H200"),
        (with_facts(settings="of another"), "does not fit (it is of a policy with other settings)"),
        (lambda path: rewrite(path, graphs=b"of another kind"), "cannot be loaded"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
    ],
)
def test_what_does_not_fit_is_a_finding_and_nothing_of_it_is_loaded(
    folder: Path, net: nn.Module, change: Callable[[Path], object], why: str
) -> None:
    path = folder / "policy.yaml.artifacts"
    change(path)
    with pytest.warns(PolicyDriftWarning) as caught, apply(folder / "policy.yaml", net, artifacts=True) as tuned:
        assert tuned.model is not net  # the wrapper of torch.compile
    (found,) = tuned.findings
    assert found.code == "artifacts-not-used"
    assert str(found).startswith(f"{path} {why}")
    assert str(found).endswith(": torch.compile compiles the model anew")
    assert [(str(one.message), one.filename) for one in caught] == [(str(found), __file__)]
    assert not loaded(folder)


def test_the_file_beside_a_policy_that_has_no_file_is_an_error_unless_nothing_is_compiled(
    folder: Path, net: nn.Module
) -> None:
    with pytest.raises(PolicyApplyError, match=r"comes from no file: give the artifacts by their path, artifacts="):
        apply(COMPILED, net, artifacts=True)
    apply(Policy(), net, artifacts=folder / "nothing").undo()


def test_graphs_with_autocast_are_cached_until_the_policy_is_undone(net: nn.Module) -> None:
    from torch._inductor import config

    enter, leave = (f"torch.amp.autocast_mode._{name}_autocast" for name in ("enter", "exit"))
    with config.patch(unsafe_marked_cacheable_functions={leave: "the user's"}):
        with apply(COMPILED, net):
            assert {*config.unsafe_marked_cacheable_functions} == {enter, leave}
        assert config.unsafe_marked_cacheable_functions == {leave: "the user's"}


def test_no_shared_object_is_written_outside_the_cache_or_over_another(folder: Path, net: nn.Module) -> None:
    places = ["../out.so", "ab/../out.so", "ab/own.so", "ab/new.so", f"{folder}/out.so"]
    rewrite(folder / "policy.yaml.artifacts", objects=dict.fromkeys(places, b"x"))
    own, new = folder / "cache/ab/own.so", folder / "cache/ab/new.so"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"built here")
    apply(folder / "policy.yaml", net, artifacts=True).undo()
    assert {*folder.rglob("*.so")} == {own, new}
    assert own.read_bytes() == b"built here"


def test_training_in_another_script_with_an_empty_cache_finds_every_graph_of_the_tuner(folder: Path) -> None:
    (folder / "loop.py").write_text(TRAINING)
    environment = {**os.environ, **QUICK}
    told = subprocess.check_output([sys.executable, "loop.py"], cwd=folder, env=environment, text=True)
    counts: dict[str, int] = json.loads(told)
    assert counts["fxgraph_cache_hit"] == 2  # forward and backward pass
    assert counts["autograd_cache_hit"] == 1
    assert counts["compiled_kernels"] == 0
    assert not {"fxgraph_cache_miss", "autograd_cache_miss"} & counts.keys()
