"""A Trainer that amptune tunes as it stands: `amptune tune tune_a_trainer.py`, then `python tune_a_trainer.py`."""

import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import amptune
from amptune.runtime.integrations.transformers import PolicyCallback, training_arguments

torch.manual_seed(0)
POLICY = "policy.yaml" if Path("policy.yaml").exists() else amptune.Policy()
config = BertConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
tokens = torch.randint(1, 32, (128, 8))
data = [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]


def trainer(callbacks=(), **policy):
    arguments = {"per_device_train_batch_size": 16, "num_train_epochs": 6, "learning_rate": 2e-3, "logging_steps": 8}
    arguments |= {"use_cpu": not torch.cuda.is_available(), "save_strategy": "no", "report_to": "none", **policy}
    arguments = TrainingArguments(tempfile.mkdtemp(), disable_tqdm=True, **arguments)
    return Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, callbacks=list(callbacks))


def workload():
    return amptune.Workload.from_trainer(trainer())


if __name__ == "__main__":  # amptune imports this file, and must not train then
    training = trainer([PolicyCallback(POLICY)], **training_arguments(POLICY))
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")
