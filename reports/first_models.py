"""The models that amptune was developed with, as targets; the bundled ResNet-50 and BERT-base belong to them too.

    amptune tune reports/first_models.py:vgg16 --budget 120s

Five come from torchvision, timm and transformers, with random weights and synthetic data; each library is imported when
its model is built. What amptune's own versions of them measured (`h200/`, docs/results.md), and DeepLabV3+, stand in
git at f0d2760, in `amptune/workload/zoo`.
"""

from __future__ import annotations

from functools import partial

import torch
from foreign_models import text, timm_model, torchvision_model  # beside this program
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import classification, in_memory, sgd

_SMALL, _SMALL_CLASSES = 32, 10  # CIFAR-10's
_WIDTH, _GPT2_VOCABULARY, _GPT2_TOKENS = 4096, 50257, 1024


def conv1() -> Workload:
    """One strided convolution with 3 input channels; half precision makes it slower on some GPUs."""

    def batch(n: int) -> Tensor:
        return torch.randn(n, 3, 224, 224)

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        output: Tensor = model(images)
        return output.square().mean()

    return Workload(
        name="conv1",
        model=partial(nn.Conv2d, 3, 64, kernel_size=3, stride=2, padding=1),
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=loss,
        optimizer=sgd,
        batch_size=64,
    )


def mlp3() -> Workload:
    """Three wide Linear layers, as in PyTorch's AMP recipe."""

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, _WIDTH), torch.randn(n, _WIDTH)

    def model() -> nn.Module:
        first, second, third = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    return Workload(
        name="mlp3",
        model=model,
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=sgd,
        batch_size=512,
    )


def resnet18() -> Workload:
    model = partial(torchvision_model, "resnet18")
    return classification(name="resnet18", model=model, classes=1000, side=224, batch_size=64)


def vgg16() -> Workload:
    """Its classifier has 119 million of its 134 million weights, which autocast casts at each step."""
    model = partial(torchvision_model, "vgg16_bn", num_classes=_SMALL_CLASSES)
    return classification(name="vgg16", model=model, classes=_SMALL_CLASSES, side=_SMALL, batch_size=128)


def densenet161() -> Workload:
    model = partial(torchvision_model, "densenet161", num_classes=_SMALL_CLASSES)
    return classification(name="densenet161", model=model, classes=_SMALL_CLASSES, side=_SMALL, batch_size=256)


def seresnext50() -> Workload:
    model = partial(timm_model, "seresnext50_32x4d", num_classes=_SMALL_CLASSES)
    return classification(name="seresnext50", model=model, classes=_SMALL_CLASSES, side=_SMALL, batch_size=256)


def gpt2() -> Workload:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        built: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
        return built

    def batch(n: int) -> dict[str, Tensor]:
        tokens = torch.randint(_GPT2_VOCABULARY, (n, _GPT2_TOKENS))
        return {"input_ids": tokens, "labels": tokens}

    return text("gpt2", model, batch, batch_size=8)
