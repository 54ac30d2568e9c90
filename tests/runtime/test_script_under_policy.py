"""`amptune run`: a script trains under a policy without a changed line, and says in a line what was done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.script.scaling import ArrivingScaler, Scaling
from amptune.runtime.script.under_policy import ScriptUnderPolicy

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'schema: amptune.policy/1\nautocast: "{}"\nfp32_math: stock\nmemory_format: contiguous\ncudnn_benchmark: false\n'

TRAIN = """
import sys, torch
from contextlib import nullcontext
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
own, scales, out = sys.argv[1:4]
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
scaler = torch.amp.GradScaler("cpu") if scales == "scaler" else None
for epoch in range(4):
    for x, y in DataLoader(data, 16, shuffle=True):
        with torch.autocast("cpu", dtype=torch.bfloat16) if own == "autocast" else nullcontext():
            output = net(x)
            loss = torch.nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
    print(output.dtype, float(loss), optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("fused"))
torch.save(net.state_dict(), out)
print("workers", DataLoader(data, 16).num_workers)
print("scale", None if scaler is None else (scaler.is_enabled(), scaler.get_scale()), __name__, __file__)
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def trained(folder: Path, policy: str, own: str = "plain", scales: str = "none") -> tuple[dict[str, torch.Tensor], str]:
    (folder / "train.py").write_text(TRAIN)
    (folder / "policy.yaml").write_text(policy)
    done = run("-m", "amptune", "run", "policy.yaml", "train.py", "--", own, scales, "out.pt", folder=folder)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt"), done.stdout + done.stderr


def plainly(folder: Path, own: str = "plain", scales: str = "none") -> dict[str, torch.Tensor]:
    (folder / "train.py").write_text(TRAIN)
    assert run("train.py", own, scales, "plain.pt", folder=folder).returncode == 0
    weights: dict[str, torch.Tensor] = torch.load(folder / "plain.pt")
    return weights


def test_loaders_are_built_with_the_policys_settings_and_give_the_same_batches(tmp_path: Path) -> None:
    weights, said = trained(tmp_path, HEAD.format("off") + "loader: {num_workers: 2, persistent_workers: true}\n")
    torch.testing.assert_close(weights, plainly(tmp_path), rtol=0, atol=0)
    assert "workers 2" in said
    assert "DataLoaders have 2 worker processes, kept between epochs" in said


ON_A_DEVICE = """
import torch
torch.manual_seed(0)
torch.set_default_device("cpu")
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(net(torch.randn(32, 8)), torch.randint(3, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("NORM", float(torch.nn.utils.parameters_to_vector(net.parameters()).norm()))
"""


def test_under_a_default_device_a_loss_is_scaled_once(tmp_path: Path) -> None:
    """It is a mode for torch functions, under which PyTorch calls what stands in place of `backward` twice."""
    (tmp_path / "train.py").write_text(ON_A_DEVICE)
    (tmp_path / "policy.yaml").write_text(HEAD.format("fp16"))
    plain, scaled = (run(*words, folder=tmp_path).stdout for words in
                     (["train.py"], ["-m", "amptune", "run", "policy.yaml", "train.py"]))  # fmt: skip
    assert float(scaled.split()[1]) == pytest.approx(float(plain.split()[1]), rel=1e-3)


COPIES = """
import copy, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
calls = []
hook = net.register_forward_hook(lambda *_: calls.append(1))
for step in range(6):
    x = torch.randn(4, 8)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert len(calls) == 6, calls
hook.remove()
average = copy.deepcopy(net)
torch.save(net, "model.pt")
for weight in average.parameters():
    torch.nn.init.zeros_(weight)
print("COPY", float(average(x).abs().max()), float(net(x).abs().max()) > 0)
"""


@pytest.mark.parametrize(
    "settings", ["", "fused_optimizer: true\n", "fp32_modules: [{path: '0'}]\n", "compile: default\n"]
)
def test_a_copy_of_the_model_is_its_own_and_a_saved_one_is_plain(settings: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COPIES)
    (tmp_path / "policy.yaml").write_text(HEAD.format("bf16") + settings)
    done = run("-m", "amptune", "run", "policy.yaml", "train.py", folder=tmp_path)
    assert "COPY 0.0 True" in done.stdout, done.stderr[-2000:]
    read = "import sys, torch; torch.load('model.pt', weights_only=False); print('amptune' in sys.modules)"
    found = run("-c", read, folder=tmp_path).stdout.strip()
    assert found == str("fp32_modules" in settings)  # what stays in FP32 does so in a saved model too


@pytest.mark.parametrize("scales", ["none", "scaler"])
def test_under_stock_pytorch_it_trains_as_by_itself_bit_for_bit(scales: str, tmp_path: Path) -> None:
    weights, said = trained(tmp_path, HEAD.format("off"), scales=scales)
    torch.testing.assert_close(weights, plainly(tmp_path), rtol=0, atol=0)
    assert "__main__" in said
    assert "amptune: stock PyTorch around Sequential" in said


@pytest.mark.parametrize("own", ["plain", "autocast"])
def test_under_bf16_outputs_are_fp32_and_its_own_autocast_is_replaced(own: str, tmp_path: Path) -> None:
    weights, said = trained(tmp_path, HEAD.format("bf16") + "fused_optimizer: true\n", own)
    torch.testing.assert_close(weights, plainly(tmp_path), rtol=0.2, atol=0.02)
    assert "torch.bfloat16" not in said
    assert "amptune: bf16, fused optimizer around Sequential" in said
    assert ("in place of its own autocast" in said) == (own == "autocast")
    assert "True\n" in said, "the optimizer is fused"


@pytest.mark.parametrize("scales", ["none", "scaler"])
def test_fp16_scales_the_loss_by_the_script_s_scaler_or_by_one_of_amptune_s(scales: str, tmp_path: Path) -> None:
    weights, said = trained(tmp_path, HEAD.format("fp16"), scales=scales)
    torch.testing.assert_close(weights, plainly(tmp_path), rtol=0.2, atol=0.02)
    assert ("in place of its own loss scaler" in said) == (scales == "scaler")
    assert ("scale (True, " in said) == (scales == "scaler")


def test_what_does_not_fit_is_told_and_nothing_is_trained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "half.yaml").write_text(HEAD.format("off") + "weights: half\n")
    (tmp_path / "policy.yaml").write_text(HEAD.format("bf16"))
    for policy, script, code, words in (
        ("half.yaml", "train.py", 2, "half weights and FP8 come before the optimizer"),
        ("policy.yaml", "none.py", 2, "there is no script none.py"),
        ("none.yaml", "train.py", 2, "none.yaml"),
        ("policy.yaml", "train.py", 3, "train.py made no step with a module and an optimizer"),
    ):
        done = run("-m", "amptune", "run", policy, script, folder=tmp_path)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_arriving_gradients_have_their_values_and_a_step_that_overflows_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(3))
    scaler = ArrivingScaler([weight], LossScale(init=4.0, growth_interval=2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda one, *_: scaler.before_step(one))
    for factor, left, scale in ((0.5, 0.5, 4.0), (float("inf"), 0.5, 2.0), (0.25, 0.25, 2.0), (0.25, 0.0, 4.0)):
        ((factor * weight).sum() * scaler.scale).backward()  # type: ignore[no-untyped-call]
        if factor < 1:
            torch.testing.assert_close(weight.grad, torch.full((3,), factor))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(weight.detach(), torch.full((3,), left))
        assert scaler.scale == scale
    scaler.remove()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weight.grad, torch.ones(3))


def test_half_weights_are_refused_before_the_script_runs() -> None:
    with pytest.raises(PolicyApplyError, match=r"write amptune.apply\(…\) into it"):
        ScriptUnderPolicy(Policy(weights="half"), print)


def test_a_scaler_of_the_script_that_shows_late_takes_the_place_of_amptune_s() -> None:
    """A policy is applied before DistributedDataParallel is built, and before the loop has scaled anything."""
    weight, scaling = nn.Parameter(torch.ones(3)), Scaling()
    scaling.begin(Policy(autocast="fp16"), [weight])
    scaling.of_script = torch.amp.GradScaler("cpu", enabled=False)
    scaling.begin(Policy(autocast="fp16"), [weight])
    scaling.of_script.scale(scaling.scaled(weight.sum())).backward()
    assert scaling.of_script.is_enabled()
    torch.testing.assert_close(weight.grad, torch.full((3,), 65536.0))
    scaling.end()
    assert not scaling.of_script.is_enabled()


def test_a_second_model_is_told_to_run_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(HEAD.format("bf16"))
    gan = ROOT / "tests" / "workload" / "scripts" / "gan.py"
    done = run("-m", "amptune", "run", "policy.yaml", str(gan), folder=tmp_path)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if line.startswith("amptune: ")] == [
        "amptune: bf16 around Linear",
        "amptune: another Linear runs as it is: the policy is for one model",
    ]
