"""A small convolution network on real images: the 1,797 handwritten digits in scikit-learn.

The network is small enough for a laptop's CPU. The data is real, so the accuracy of a training run has a meaning.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from amptune.errors import TargetError
from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import conv_bn_relu, he_normal, named
from amptune.workload.zoo.recipes import cross_entropy, sgd

__all__ = ["digits"]


def digits(*, batch_size: int = 64) -> Workload:
    """Returns the workload. Raises `TargetError` if scikit-learn is not installed."""
    if find_spec("sklearn") is None:
        raise TargetError("digits: its images come with scikit-learn, not installed: pip install 'amptune[digits]'")
    return Workload(
        name="digits",
        model=_model,
        batch=_batch,
        loader=_loader,
        loss=cross_entropy,
        optimizer=sgd,
        evaluate=_accuracy,
        batch_size=batch_size,
    )


def _model() -> nn.Sequential:
    return he_normal(
        named(
            conv1=conv_bn_relu(1, 48, 3),
            conv2=conv_bn_relu(48, 64, 3, stride=2),
            conv3=conv_bn_relu(64, 128, 3, stride=2),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(128 * 4 * 4, 10),
        )
    )


def _batch(n: int) -> tuple[Tensor, Tensor]:
    """Returns images (n, 1, 32, 32) and labels (n,), drawn from the training part with replacement."""
    images, _, labels, _ = _scans()
    drawn = torch.randint(len(images), (n,))
    return images[drawn], labels[drawn]


def _loader(batch_size: int) -> DataLoader[Any]:
    """Returns a shuffled loader of single samples; it draws with replacement if a batch exceeds the training part."""
    images, _, labels, _ = _scans()
    dataset = TensorDataset(images, labels)
    larger = batch_size > len(dataset)
    drawn = RandomSampler(dataset, replacement=larger, num_samples=max(batch_size, len(dataset)))
    pinned = torch.cuda.is_available()
    return DataLoader(dataset, batch_size=batch_size, sampler=drawn, drop_last=True, pin_memory=pinned)


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    """Returns the share of the held-out fifth that is recognized."""
    _, images, _, labels = _scans()
    device = next(model.parameters()).device
    was_training = model.training
    try:
        guesses = model.eval()(images.to(device)).argmax(dim=1).cpu()
    finally:
        model.train(was_training)
    return float((guesses == labels).float().mean())


@cache
def _scans() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images, test images, training labels, test labels; the split is equal on every machine."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    scans = load_digits()
    # 8x8 pixels of 0 to 16 become (n, 1, 32, 32) of 0 to 1, each pixel repeated 4x4.
    images = (scans.images / 16).astype("float32").repeat(4, axis=1).repeat(4, axis=2)[:, None]
    parts = train_test_split(images, scans.target, test_size=0.2, random_state=0, stratify=scans.target)
    training, test, training_labels, test_labels = map(torch.from_numpy, parts)
    return training, test, training_labels, test_labels
