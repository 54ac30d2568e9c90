"""A causal language model under transformers' Trainer, as people write it."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=5000)
parser.add_argument("--out", default="trainer_out")
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=100, n_embd=args.width, n_layer=args.layers, n_head=2, n_positions=args.length, use_cache=False
)
words = torch.randint(100, (256, args.length))
data = [{"input_ids": one, "labels": one} for one in words]
arguments = TrainingArguments(
    args.out,
    per_device_train_batch_size=args.batch_size,
    gradient_accumulation_steps=2,
    max_steps=args.steps,
    save_steps=50,
    logging_steps=50,
    bf16=args.bf16,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
)
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data).train()
