"""Three wide Linear layers: the model of PyTorch's AMP recipe, which is faster in half precision.

https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import named
from amptune.workload.zoo.recipes import in_memory, sgd

__all__ = ["mlp3"]


def mlp3(*, width: int = 4096, batch_size: int = 512) -> Workload:
    pairs = partial(_pairs, width=width)
    return Workload(
        name="mlp3",
        model=partial(_model, width),
        batch=pairs,
        loader=partial(in_memory, batch=pairs),
        loss=_mean_square_error,
        optimizer=sgd,
        batch_size=batch_size,
    )


def _model(width: int) -> nn.Sequential:
    return named(
        linear1=nn.Linear(width, width),
        relu1=nn.ReLU(),
        linear2=nn.Linear(width, width),
        relu2=nn.ReLU(),
        linear3=nn.Linear(width, width),
    )


def _pairs(n: int, *, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, width), torch.randn(n, width)


def _mean_square_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)
