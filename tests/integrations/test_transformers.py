from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICY, Batch, batches, net, same_weights, train_plainly

from amptune.errors import PolicyApplyError
from amptune.hardware.detect import probe
from amptune.policy.file_io import load
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning
from amptune.runtime.claim_watch import STEPS

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer of transformers needs, is not installed")

import transformers
from transformers import Trainer, TrainingArguments

from amptune.runtime.integrations.transformers import PolicyCallback, training_arguments


@pytest.fixture(autouse=True)
def _nothing_left_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions leave there what the last Trainer autocast in."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


class ForTrainer(nn.Module):
    """As the Trainer wants its models: labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def collate(samples: Any) -> dict[str, torch.Tensor]:
    (batch,) = samples
    return {"x": batch[0], "labels": batch[1]}


def arguments(folder: Path, policy: Policy, **more: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    own = training_arguments(replace(policy, batch_size=1))  # a sample here is a whole batch
    return TrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, **quiet, **plain, **own, **more}
    )


def trainer(
    folder: Path, callback: PolicyCallback, *, data: list[Batch] | None = None, model_init: Any = None, **more: Any
) -> Any:
    args = arguments(folder, callback.policy, **more)
    parts: Any = {"data_collator": collate, "train_dataset": data or batches(), "callbacks": [callback]}
    made: Any = Trainer(None if model_init else ForTrainer(), args, model_init=model_init, **parts)
    made._get_train_sampler = lambda *_: None  # in order
    return made


RULE = replace(POLICY, fp32_modules=tuple(replace(rule, path="net.head") for rule in POLICY.fp32_modules))


@pytest.mark.parametrize("policy", [RULE, replace(RULE, fused_optimizer=True), Policy()], ids=str)
def test_it_trains_as_the_plain_loop_does(policy: Policy, tmp_path: Path) -> None:
    callback = PolicyCallback(policy)
    made, twin = trainer(tmp_path, callback), net()
    made.train()
    train_plainly(replace(policy, fp32_modules=POLICY.fp32_modules if policy.fp32_modules else ()), twin, batches())
    assert same_weights(made.model.net, twin)
    assert made.model.net.head_dtypes == {torch.float32}
    assert made.optimizer.optimizer.param_groups[0]["fused"] is (policy.fused_optimizer or None)
    assert callback.tuned is not None
    callback.tuned.undo()
    assert type(made.model.net.head) is nn.Linear


def test_steps_are_held_to_the_files_evidence(tmp_path: Path) -> None:
    """The Trainer autocasts by itself, so the callback says when a step begins; its batch is one sample here."""
    policy = replace(RULE, batch_size=1, accumulate=2)
    labels = dict(probe("cpu").labels)
    callback = PolicyCallback(PolicyFile(policy=policy, valid_for=labels, evidence={"step_ms": 1e-6}))
    made = trainer(tmp_path, callback, data=batches(2 * (STEPS + 1)), logging_steps=1000)
    with pytest.warns(PolicyDriftWarning, match="this policy promised 1e-06"):
        made.train()
    assert not made.optimizer.optimizer._optimizer_step_post_hooks
    assert callback.tuned is not None
    callback.tuned.undo()


def test_the_arguments_say_what_the_policy_says() -> None:
    policy = Policy(autocast="fp16", batch_size=8, accumulate=4, compile="reduce-overhead")
    assert training_arguments(policy) == {
        "bf16": False, "fp16": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
        "torch_compile": True, "torch_compile_mode": "reduce-overhead",
    }  # fmt: skip
    assert training_arguments(Policy()) == {"bf16": False, "fp16": False, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("policy", [RULE, replace(RULE, fused_optimizer=True, memory_format="channels_last")], ids=str)
def test_each_model_that_model_init_makes_gets_the_policy(policy: Policy, tmp_path: Path) -> None:
    callback, twin = PolicyCallback(policy), net()
    made = trainer(tmp_path, callback, model_init=ForTrainer)
    train_plainly(replace(policy, fp32_modules=POLICY.fp32_modules), twin, batches())
    for _ in range(2):
        before = made.model
        made.train()
        assert made.model is not before
        assert same_weights(made.model.net, twin)
        assert made.model.net.head_dtypes == {torch.float32}
        assert type(before.net.head) is nn.Linear  # undone
        assert type(made.model.net.head) is not nn.Linear
    assert callback.tuned is not None
    callback.tuned.undo()
    assert type(made.model.net.head) is nn.Linear


def test_arguments_that_contradict_the_policy_are_an_error(tmp_path: Path) -> None:
    own = training_arguments(RULE, output_dir=str(tmp_path), seed=3)
    assert own == {**training_arguments(RULE), "output_dir": str(tmp_path), "seed": 3}
    twice = r"bf16: True in training_arguments\(…\), True from the policy\n  gradient_accumulation_steps: 2 in"
    with pytest.raises(PolicyApplyError, match=twice):
        training_arguments(RULE, bf16=True, gradient_accumulation_steps=2, seed=3)
    other: dict[str, Any] = {"bf16": False, "torch_compile": False, "torch_compile_mode": None}
    with pytest.raises(PolicyApplyError, match="autocast: off here, bf16 in the policy\n  compile: off here"):
        trainer(tmp_path, PolicyCallback(replace(RULE, compile="default")), **other)


def test_a_callback_that_comes_too_late_and_a_module_around_the_model_are_errors(tmp_path: Path) -> None:
    made = Trainer(ForTrainer(), arguments(tmp_path, RULE), data_collator=collate, train_dataset=batches())
    made.add_callback(PolicyCallback(RULE))
    with pytest.raises(PolicyApplyError, match="begins with a model that has no policy: pass PolicyCallback as Train"):
        made.train()
    callback, model = PolicyCallback(RULE), ForTrainer()
    callback.on_init_end(*asked(bf16=True), model=model)
    with pytest.raises(PolicyApplyError, match="the Trainer put a Sequential around the model"):  # as FSDP 1 does
        callback.on_train_begin(*asked(bf16=True), model=nn.Sequential(model), optimizer=None)


def asked(step: int = 0, **flags: bool) -> tuple[Any, Any, Any]:
    """The arguments, the state and the control that a callback gets."""
    plain = {"fp16": False, "bf16": False, "torch_compile": False, "torch_compile_mode": None}
    return SimpleNamespace(**{**plain, **flags}), SimpleNamespace(global_step=step), None


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="its default optimizer is that of version 5"
)
def test_the_baseline_transformers_is_what_a_trainer_does_by_default(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    optimizer = Trainer(ForTrainer(), args).create_optimizer()
    assert optimizer.param_groups[0]["fused"]
    assert (args.bf16, args.fp16, args.tf32, args.torch_compile) == (False, False, None, False)
    assert args.gradient_accumulation_steps == 1
    assert load("transformers").policy == Policy(fused_optimizer=True)


@pytest.mark.parametrize(("step", "scale"), [(0, 256), (10, 1024)])
def test_loss_scaling_begins_as_the_policy_says_and_a_resumed_one_goes_on(step: int, scale: float) -> None:
    """The Trainer trains in fp16 on GPUs alone, so it is stood in for."""
    callback, model = PolicyCallback(Policy(autocast="fp16", loss_scale=LossScale(init=256))), net()
    callback.on_init_end(*asked(step, fp16=True), model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()), scaler=scaler)
    callback.on_train_begin(*asked(step, fp16=True), model=model, optimizer=optimizer)
    assert scaler.get_scale() == scale


def test_half_weights_are_refused_as_its_scaler_does_not_know_them() -> None:
    half = "^The Trainer scales the loss beside its own autocast alone, not for half weights"
    with pytest.raises(PolicyApplyError, match=half):
        training_arguments("apex:O2")
    with pytest.raises(PolicyApplyError, match=half):
        PolicyCallback("apex:O2").on_init_end(*asked(), model=net())
