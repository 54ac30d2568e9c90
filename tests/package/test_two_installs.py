"""Training needs torch, PyYAML and typing_extensions; tuning and the commands need the extra `tune`, and say so."""

from __future__ import annotations

import ast
import json
import pickle
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import commands
import pytest
import torch
from distributions import normal, required_by
from packaging.requirements import Requirement

import amptune
from amptune import errors
from amptune.errors import AmptuneError

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TUNED = REPOSITORY / "reports" / "h200" / "resnet50.policy.yaml"

# A training node has torch with what that requires, and these.
ALLOWED = required_by("torch") | {"pyyaml", "typing-extensions", "amptune"}
BLOCKED = {module for module, names in packages_distributions().items() if not set(map(normal, names)) & ALLOWED}

BLOCK = """
import sys
from importlib.machinery import PathFinder

class Allowed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Allowed
"""

TRAIN = """
import amptune, json, torch, warnings
from torch import nn
warnings.simplefilter("ignore")
DEVICE = "cpu"

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).to(DEVICE)

def train(policy):
    one = model()
    with amptune.apply(policy, one, guard=True, protect_batch_norm=True, any_hardware=True) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(one.parameters(), lr=0.1))
        for _ in range(3):
            with tuned.autocast():
                loss = tuned.model(tuned.batch(torch.randn(8, 3, 8, 8, device=DEVICE))).float().square().mean()
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
        return loss.item()

"""


def in_a_training_node(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code where the packages of the extra `tune`, and all others that training does not need, are missing."""
    command = [sys.executable, "-c", BLOCK.format(blocked=BLOCKED) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def output_of(code: str, *arguments: str, folder: Path) -> str:
    done = in_a_training_node(code, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_node_lacks_what_tuning_needs(tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    extra = ["click", "cloudpickle", "optuna", "pebble", "psutil", "pydantic", "pynvml", "rich", "scipy"]
    code = f"from importlib.util import find_spec; print(*filter(find_spec, {[*extra, 'yaml']}))"
    assert output_of(code, folder=tmp_path) == "yaml\n"


def test_a_tuned_file_trains_with_the_guard_on_a_training_node(tmp_path: Path) -> None:
    settings = '{"autocast": "fp16"}, {"weights": "half", "master_weights": True}, {"memory_format": "channels_last"}'
    (tmp_path / "cluster.yaml").write_text(
        "schema: amptune.profile/1\nentries:\n  - match: {kubernetes.io/arch: never}\n    policy: {}\n"
        "default: {autocast: bf16, fp32_modules: [{type: Linear}]}\n"
    )
    tuned = re.sub(r"fp32_modules:\n(  .*\n)+|compile: .*\n", "", TUNED.read_text())  # are of ResNet-50
    (tmp_path / "tuned.yaml").write_text(tuned)
    losses = output_of(
        TRAIN
        + f"policies = ['apex:O2', 'cluster.yaml', 'tuned.yaml'] + [amptune.Policy(**one) for one in [{settings}]]"
        "\nprint(json.dumps([train(policy) for policy in policies]))",
        folder=tmp_path,
    )
    assert len(json.loads(losses)) == 6


def test_a_script_trains_under_a_policy_on_a_training_node(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "schema: amptune.policy/1\nautocast: bf16\nfp32_math: stock\nmemory_format: contiguous\n"
        "cudnn_benchmark: false\nfused_optimizer: true\n"
    )
    (tmp_path / "train.py").write_text(
        "import sys, torch\nnet = torch.nn.Linear(2, 2)\nsgd = torch.optim.SGD(net.parameters())\n"
        "for _ in range(4):\n    out = net(torch.ones(1, 2))\n    out.sum().backward()\n    sgd.step()\n"
        "print(out.dtype, sgd.param_groups[0]['fused'], sys.argv)\n"
    )
    code = "from amptune.__main__ import main; sys.argv[1:1] = ['run', 'policy.yaml', 'train.py']; main()"
    assert output_of(code, "--lr", "1", folder=tmp_path) == "torch.float32 True ['train.py', '--lr', '1']\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_training_node_records_cuda_graphs(tmp_path: Path) -> None:
    code = TRAIN.replace('DEVICE = "cpu"', 'DEVICE = "cuda"').replace("return loss.item()", "return tuned.findings")
    policy = 'amptune.Policy(autocast="bf16", cuda_graphs=True)'
    assert output_of(f"{code}print(train({policy}))", folder=tmp_path) == "()\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_file_of_a_machine_with_nvml_is_valid_on_a_training_node_without(tmp_path: Path) -> None:
    """Without NVML the memory is torch's figure, which is some hundred MiB less."""
    labels = dict(amptune.probe().labels)
    here = {name: label for name, label in labels.items() if name.startswith("nvidia.com/gpu.")}
    tuned = amptune.PolicyFile(policy=amptune.Policy(autocast="bf16", memory_format="channels_last"), valid_for=here)
    amptune.save(tuned, tmp_path / "policy.yaml")
    code = TRAIN.replace("any_hardware=True", "any_hardware=False").replace('DEVICE = "cpu"', 'DEVICE = "cuda"')
    assert float(output_of(code + "print(train('policy.yaml'))", folder=tmp_path)) > 0


WRONG = {
    "a-key": "schema: amptune.policy/1\nautcast: bf16\nbatch_size: 0\n",
    "twice": "schema: amptune.policy/1\nname: a\nname: b\nloss_scale: {init: -1}\n",
    "rules": "schema: amptune.policy/1\nfp32_modules:\n  - {path: a, type: b}\n  - {pth: a}\n  - a\n",
    "a-profile": "schema: amptune.profile/1\nentries:\n  - match: {a: [b]}\n  - {matches: {}, policy: {compile: 3}}\n",
    "a-tag": "schema: amptune.policy/1\nname: !!python/name:os.system x\n",
}
RIGHT = {
    "spellings": "schema: amptune.policy/1\nbatch_size: 10.0\ncudnn_benchmark: on\nfp32_modules: [{path: 0}]\n",
    "profile": "schema: amptune.profile/1\nentries: []\ndefault: {autocast: off, valid_for: {torch: 2.10}}\n",
}


def test_a_training_node_accepts_and_refuses_the_files_that_check_does_with_the_same_messages(tmp_path: Path) -> None:
    for name, text in (WRONG | RIGHT).items():
        (tmp_path / f"{name}.yaml").write_text(text)
    code = (
        "import amptune, json, sys\nsaid = {}\nfor name in sys.argv[1:]:\n"
        "    try: amptune.load(f'{name}.yaml'); said[name] = None\n"
        "    except amptune.AmptuneError as error: said[name] = str(error)\n"
        "print(json.dumps(said))"
    )
    said = json.loads(output_of(code, *WRONG, *RIGHT, folder=tmp_path))
    assert {name for name, message in said.items() if message is None} == set(RIGHT)
    for name, message in said.items():
        checked = commands.run("check", f"{name}.yaml", folder=tmp_path)
        assert checked.returncode == (0 if message is None else 2)
        assert message is None or checked.stderr == f"error: {message}\n"


COMMAND = "import runpy; runpy.run_module('amptune', run_name='__main__', alter_sys=True)"
LACKS = "amptune's extra `tune`: in a clone of amptune, pip install '.[tune]'\n"


def test_commands_and_tuning_from_python_say_in_one_line_what_a_training_node_lacks(tmp_path: Path) -> None:
    for arguments in (["--help"], ["check", "policy.yaml"]):
        done = in_a_training_node(COMMAND, *arguments, folder=tmp_path)
        said = f"error: click is not installed; tuning and all commands need {LACKS}"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    code = "import amptune\ntry: amptune.tune\nexcept amptune.MissingPackageError as error: print(error)"
    assert output_of(code.replace("amptune.M", "amptune.errors.M"), folder=tmp_path).endswith(f"need {LACKS}")


def test_so_does_a_command_that_lacks_a_single_package_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(commands.WORKLOADS)
    command = [sys.executable, "-c", BLOCK.format(blocked={"scipy"}) + COMMAND, "tune", "train.py:small", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["message"].startswith("scipy is not installed; ")
    assert (done.returncode, done.stderr) == (2, f"error: {finding['message']}\n")


def test_a_stand_in_for_a_package_is_that_package_and_the_error_survives_pickling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module made in a test has no spec, and `find_spec` refuses it."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    errors.require_tune()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(AmptuneError, match="pynvml is not installed") as caught:
        errors.require_tune()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_all_packages_of_the_extra_are_looked_for() -> None:
    names = packages_distributions()
    looked_for = {normal(name) for module in errors._TUNE for name in names[module]}
    assert looked_for == declared(PROJECT["optional-dependencies"]["tune"])


def declared(requirements: list[str]) -> set[str]:
    return {normal(Requirement(line).name) for line in requirements}


def imported() -> set[str]:
    nodes = [node for path in (REPOSITORY / "amptune").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    modules = {module.partition(".")[0] for module in modules} - {"amptune"}
    names = packages_distributions()
    return {normal(name) for module in modules for name in names.get(module, ())}


def test_every_package_that_is_imported_is_declared_and_every_declared_one_imported() -> None:
    extras = PROJECT["optional-dependencies"]
    core, tune = declared(PROJECT["dependencies"]), declared(extras["tune"])
    others = set().union(*(declared(extras[name]) for name in ("digits", "float8", "integrations")))
    assert core == {"torch", "pyyaml", "typing-extensions"}
    assert not core & tune
    assert core | tune <= imported()
    assert imported() - core - tune - others <= {"pydantic-core", "pytorch-lightning"}
