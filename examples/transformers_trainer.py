"""The Trainer of transformers: a callback applies the policy, and the arguments say the rest of it."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import amptune
from amptune.runtime.integrations.transformers import PolicyCallback, training_arguments

torch.manual_seed(0)
config = BertConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)
tokens = torch.randint(1, 32, (128, 8))
data = [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="classifier"),), batch_size=16)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        **training_arguments(  # or training_arguments("policy.yaml", …)
            policy,
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=6,
            learning_rate=2e-3,
            logging_steps=8,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PolicyCallback(policy)])
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")
