"""Measures policies beside stock PyTorch in one sitting, to be repeated in later ones: how far do sittings differ?

    python reports/sittings.py --models cpu --out reports/sittings/cpu-1.jsonl

Each model gets `--launches` launches of fresh processes and `--rounds` rounds in each, all policies in turn. Writes one
line for each block, as it arrives: the model, the moment, the launch, the policy and its outcome. A second sitting is
the same command with another file, at least ten minutes later; `sittings_judged.py` holds one against the other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amptune import Workload
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import ENERGY_S, Effort, outcome_to_dict
from amptune.measure.workers.source import Source
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import STOCK, Policy, amp_recipe

EFFORT = Effort(warmup_s=0.6, measure_s=0.4, min_steps=6, precision=0.003, energy_s=ENERGY_S, time_limit_s=120.0)

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
BF16_CL, FP16_CL = amp_recipe("bf16", memory_format="channels_last"), amp_recipe("fp16", memory_format="channels_last")
CL, FUSED, TF32 = Policy(memory_format="channels_last"), Policy(fused_optimizer=True), Policy(fp32_math="tf32")
GRAPHS = Policy(autocast="bf16", memory_format="channels_last", cuda_graphs=True)
IMAGES_CPU, OTHERS_CPU = (CL, BF16_CL, FUSED), (BF16, FUSED, TF32)
IMAGES_GPU, OTHERS_GPU = (BF16, FP16_CL, GRAPHS), (TF32, BF16, Policy(autocast="bf16", cuda_graphs=True))


def vision(
    model: Callable[[], nn.Module], batch_size: int, size: int, classes: int = 10, adam: bool = False
) -> Callable[[], Workload]:
    """A classifier of images (batch, 3, size, size)."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return (
            torch.optim.AdamW(model.parameters()) if adam else torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        )

    return lambda: Workload(
        model=model,
        batch=lambda n: (torch.randn(n, 3, size, size), torch.randint(classes, (n,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=optimizer,
        batch_size=batch_size,
    )


def conv_net(width: int, depth: int, groups: int = 1) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.BatchNorm2d(width), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    return build


def mlp(width: int, depth: int, batch_size: int) -> Callable[[], Workload]:
    def build() -> nn.Module:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(64, width), *hidden, nn.Linear(width, 10))

    return lambda: Workload(
        model=build,
        batch=lambda n: (torch.randn(n, 64), torch.randint(10, (n,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        batch_size=batch_size,
    )


class Tokens(nn.Module):
    """A sequence model of tokens: (batch, length) to (batch, vocabulary)."""

    def __init__(self, body: nn.Module, width: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(vocabulary, width), body, nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.body(self.embedding(tokens))
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))  # type: ignore[no-any-return]


def tokens(body: Callable[[], nn.Module], width: int, length: int, batch_size: int) -> Callable[[], Workload]:
    return lambda: Workload(
        model=lambda: Tokens(body(), width),
        batch=lambda n: (torch.randint(1000, (n, length)), torch.randint(1000, (n,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        batch_size=batch_size,
    )


def transformer(width: int, layers: int, dropout: float = 0.0) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer
        return nn.Sequential(*(layer(width, 4, 4 * width, dropout, batch_first=True) for _ in range(layers)))

    return build


def torchvision_model(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)  # type: ignore[no-any-return]

    return build


cpu_conv_small = vision(conv_net(16, 3), 16, 32)
cpu_conv_wide = vision(conv_net(64, 4), 8, 32)
cpu_conv_deep = vision(conv_net(24, 12), 8, 32)
cpu_conv_grouped = vision(conv_net(64, 6, groups=64), 8, 32, adam=True)
cpu_conv_large = vision(conv_net(32, 4), 4, 96)
cpu_mlp_small = mlp(128, 3, 32)
cpu_mlp_wide = mlp(1024, 3, 64)
cpu_mlp_deep = mlp(256, 16, 64)
cpu_mlp_batch = mlp(256, 3, 1024)
cpu_lstm = tokens(lambda: nn.LSTM(64, 64, batch_first=True), 64, 32, 16)
cpu_gru_wide = tokens(lambda: nn.GRU(256, 256, batch_first=True), 256, 16, 16)
cpu_transformer = tokens(transformer(64, 2), 64, 32, 16)
cpu_transformer_wide = tokens(transformer(256, 2), 256, 32, 8)
cpu_transformer_dropout = tokens(transformer(128, 4, 0.1), 128, 16, 8)

gpu_mobilenet = vision(torchvision_model("mobilenet_v3_large"), 64, 224, 1000)
gpu_shufflenet = vision(torchvision_model("shufflenet_v2_x1_0"), 64, 128, 1000)
gpu_convnext = vision(torchvision_model("convnext_tiny"), 32, 224, 1000, adam=True)
gpu_vit = vision(torchvision_model("vit_b_16"), 32, 224, 1000, adam=True)
gpu_regnet = vision(torchvision_model("regnet_y_800mf"), 64, 176, 1000)
gpu_mlp_deep = mlp(1024, 16, 256)
gpu_transformer_small = tokens(transformer(256, 6, 0.1), 256, 64, 16)
gpu_transformer_wide = tokens(transformer(1024, 8), 1024, 256, 16)

CPU = {name: IMAGES_CPU if "conv" in name else OTHERS_CPU for name in dict(globals()) if name.startswith("cpu_")}
GPU = {
    **{
        f"amptune.workload.zoo:{name}": IMAGES_GPU for name in ("resnet18", "resnet50", "vgg16", "densenet161", "conv1")
    },
    **{f"amptune.workload.zoo:{name}": OTHERS_GPU for name in ("mlp3", "bert_base")},
    **{
        name: IMAGES_GPU if any(word in name for word in ("net", "convnext")) else OTHERS_GPU
        for name in dict(globals())
        if name.startswith("gpu_")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="*", help="some of the models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    models: Mapping[str, Sequence[Policy]] = CPU if arguments.models == "cpu" else GPU
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        for name in arguments.only or models:
            began = time.monotonic()
            for line in sitting(name, (STOCK, *models[name]), arguments):
                file.write(json.dumps(line) + "\n")
                file.flush()
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return 0


def sitting(name: str, policies: Sequence[Policy], arguments: argparse.Namespace) -> Any:
    target = name if ":" in name else f"{Path(__file__).resolve()}:{name}"
    order = random.Random(arguments.seed)  # noqa: S311  # an order of measuring, no secret
    device = "cpu" if arguments.models == "cpu" else None
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerEvaluator(Source(target=target), device, Path(folder) / "log") as evaluator,
    ):
        evaluator.prepare(120.0)
        for launch in range(arguments.launches):
            evaluator.launch(policies)
            for _ in range(arguments.rounds):
                for policy in order.sample(policies, len(policies)):
                    outcome = outcome_to_dict(evaluator.measure(policy, EFFORT))
                    if "step_ms" in outcome:
                        outcome["step_ms"] = [round(ms, 4) for ms in outcome["step_ms"]]
                    yield {
                        "model": name.rpartition(":")[2],
                        "moment": round(time.time(), 2),
                        "launch": launch,
                        "policy": policy_to_dict(policy),
                        "outcome": outcome,
                    }


if __name__ == "__main__":
    sys.exit(main())
