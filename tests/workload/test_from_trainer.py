"""Workloads from a Trainer of transformers, which is built anew where it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from amptune import Fp32Rule, Policy, Workload
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK
from amptune.runtime.apply_policy import has_policy
from amptune.runtime.integrations.transformers import PolicyCallback, training_arguments
from amptune.workload.by_value import from_bytes, to_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DATA = [{"input_ids": torch.randint(1, 32, (8,)), "labels": i % 2} for i in range(40)]


class Weighted(Trainer):
    """A Trainer with an argument and a loss of its own, which takes the labels out of the batch."""

    def __init__(self, *args: Any, weight: torch.Tensor, **more: Any) -> None:
        super().__init__(*args, **more)
        self.weight = weight

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # noqa: ARG002
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, weight=self.weight)


def trainer_of(folder: Path, kind: Any = Trainer, arguments: Any = None, **more: Any) -> Any:
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(num_attention_heads=2, num_labels=2, **small))
    plain = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.01}
    settings: Any = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        **{**plain, **(arguments or {})},
    )
    return kind(model, settings, **{"train_dataset": DATA, **more})


def sent(workload: Workload) -> Workload:
    there = from_bytes(to_bytes(workload, "workload"))
    assert isinstance(there, Workload)
    return there


def test_its_loss_optimizer_batches_and_accumulation_are_the_trainers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, arguments={"weight_decay": 0.1, "bf16": True, "gradient_checkpointing": True})
    before = [weight.clone() for weight in trainer.model.parameters()]
    workload = sent(Workload.from_trainer(trainer))
    assert (workload.batch_size, workload.accumulate, workload.clip) == (4, 2, 1.0)
    bench = Bench(workload, torch.device("cpu"))
    outcome = bench.measure(STOCK, Effort(warmup_s=0.01, measure_s=0.01, min_steps=2))
    assert isinstance(outcome, Measurement), outcome
    model: Any = workload.model()
    assert (model.training, model.is_gradient_checkpointing) == (True, True)
    decays = [group["weight_decay"] for group in workload.optimizer(model).param_groups]
    assert decays == [0.1, 0.0]
    assert workload.batch(3)["input_ids"].shape == (3, 8)
    assert workload.loader is not None
    assert [len(next(iter(workload.loader(size)))["labels"]) for size in (4, 6)] == [4, 6]
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_class_with_a_loss_and_arguments_of_its_own_keeps_them(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Weighted, weight=torch.tensor([1.0, 5.0]))
    workload = sent(Workload.from_trainer(trainer))
    model = workload.model().eval()
    batch = workload.batch(4)
    expected = torch.nn.functional.cross_entropy(
        model(input_ids=batch["input_ids"]).logits, batch["labels"], weight=torch.tensor([1.0, 5.0])
    )
    assert workload.loss is not None
    for _ in range(2):  # the labels are still there
        assert torch.equal(workload.loss(model, batch), expected)


def test_an_optimizer_that_the_trainer_was_given_is_built_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3)
    workload = sent(Workload.from_trainer(trainer))
    optimizer = workload.optimizer(workload.model())
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_what_holds_the_weights_itself_is_refused_with_the_reason(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(TargetError, match="uses DeepSpeed, which holds the weights itself"):
        Workload.from_trainer(trainer)
    with pytest.raises(TargetError, match="no train_dataset"):
        Workload.from_trainer(trainer_of(tmp_path, train_dataset=None))
    with pytest.raises(TargetError, match="trainer is int, not a Trainer"):
        Workload.from_trainer(3)


def test_a_policy_in_use_is_undone_in_a_process_that_measures(tmp_path: Path) -> None:
    """So that a script is tuned again, or verified, as it is in use."""
    policy = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="classifier"),), batch_size=4, accumulate=2)
    arguments: Any = training_arguments(policy)
    trainer = trainer_of(tmp_path, arguments=arguments, callbacks=[PolicyCallback(policy)])
    workload = Workload.from_trainer(trainer)
    with pytest.raises(TargetError, match="a policy is applied to the model"):
        to_bytes(workload, "workload")
    model: Any = workload.model
    model.give_back()
    assert not has_policy(sent(workload).model())
