"""DeepLabV3+ over a ResNet-101 (Chen et al., 2018, arXiv:1802.02611), on street scenes with 19 classes.

Output stride 16, plain (not separable) convolutions, images of half Cityscapes' size cropped to 512x896. The variant is
the one of a forum's case, which trained at half the speed under autocast on a GTX 1080 Ti (see `cases.csv` in
reports/published).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import conv_bn_relu, he_normal, named
from amptune.workload.zoo.recipes import in_memory, sgd
from amptune.workload.zoo.resnet import bottleneck, stages

__all__ = ["deeplabv3plus", "deeplabv3plus_multigrid"]

_UNLABELLED = 255
_AUXILIARY_SHARE = 0.4


def deeplabv3plus(*, classes: int = 19, height: int = 512, width: int = 896, batch_size: int = 4) -> Workload:
    model = partial(DeepLabV3Plus, classes)
    return _on_scenes("deeplabv3plus", model, classes=classes, height=height, width=width, batch_size=batch_size)


def deeplabv3plus_multigrid(*, classes: int = 19, height: int = 512, width: int = 896, batch_size: int = 4) -> Workload:
    """The variant: dilations 2, 4, 8 in the last stage, aligned corners, Dropout2d, and an auxiliary output."""
    model = partial(DeepLabV3Plus, classes, dilations=(2, 4, 8), align_corners=True, dropout=0.1, auxiliary=True)
    name = "deeplabv3plus_multigrid"
    return _on_scenes(name, model, classes=classes, height=height, width=width, batch_size=batch_size)


def _on_scenes(
    name: str, model: Callable[[], nn.Module], *, classes: int, height: int, width: int, batch_size: int
) -> Workload:
    scenes = partial(_scenes, height=height, width=width, classes=classes)
    return Workload(
        name=name,
        model=model,
        batch=scenes,
        loader=partial(in_memory, batch=scenes),
        loss=_pixel_cross_entropy,
        optimizer=sgd,
        batch_size=batch_size,
    )


class DeepLabV3Plus(nn.Module):
    """A network from images to logits per pixel: coarse context, refined by the first stage's features.

    If `auxiliary`, it gives in training a second set of logits too, from the last stage but one.
    """

    def __init__(
        self,
        classes: int,
        *,
        dilations: tuple[int, ...] = (2, 2, 2),
        align_corners: bool = False,
        dropout: float = 0.0,
        auxiliary: bool = False,
    ) -> None:
        super().__init__()
        self.resized = partial(_resized, align_corners=align_corners)
        backbone = stages(bottleneck, (3, 4, 23, 3), last_dilations=dilations)
        self.shallow = named(stem=backbone.pop("stem"), layer1=backbone.pop("layer1"))
        self.deep = named(**backbone)
        self.aspp = AtrousPyramid(2048, 256)
        self.sharpen = conv_bn_relu(256, 48, 1)
        refine = {"conv1": conv_bn_relu(256 + 48, 256, 3), "conv2": conv_bn_relu(256, 256, 3)}
        self.decoder = named(**refine, **_classifier(classes, dropout))
        self.auxiliary = named(conv=conv_bn_relu(1024, 256, 3), **_classifier(classes, dropout)) if auxiliary else None
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        edges: Tensor = self.shallow(images)
        if self.auxiliary is None or not self.training:
            return self._labelled(self.deep(edges), edges, images)
        *_, coarse, deep = accumulate(self.deep, lambda x, layer: layer(x), initial=edges)
        return self._labelled(deep, edges, images), self.resized(self.auxiliary(coarse), like=images)

    def _labelled(self, deep: Tensor, edges: Tensor, images: Tensor) -> Tensor:
        context = self.resized(self.aspp(deep), like=edges)
        logits: Tensor = self.resized(self.decoder(torch.cat([context, self.sharpen(edges)], dim=1)), like=images)
        return logits


def _classifier(classes: int, dropout: float) -> dict[str, nn.Module]:
    dropped: dict[str, nn.Module] = {"dropout": nn.Dropout2d(dropout)} if dropout else {}
    return {**dropped, "classifier": nn.Conv2d(256, classes, 1)}


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of the features at several dilations, and their average."""

    def __init__(self, inputs: int, outputs: int, *, rates: tuple[int, ...] = (6, 12, 18)) -> None:
        super().__init__()
        atrous = (conv_bn_relu(inputs, outputs, 3, dilation=rate) for rate in rates)
        self.branches = nn.ModuleList([conv_bn_relu(inputs, outputs, 1), *atrous])
        self.average = named(pool=nn.AdaptiveAvgPool2d(1), project=conv_bn_relu(inputs, outputs, 1))
        self.project = conv_bn_relu(outputs * (len(rates) + 2), outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [branch(x) for branch in self.branches]
        seen.append(_resized(self.average(x), like=x, align_corners=False))
        projected: Tensor = self.project(torch.cat(seen, dim=1))
        return projected


def _resized(x: Tensor, *, like: Tensor, align_corners: bool) -> Tensor:
    return functional.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=align_corners)


def _scenes(n: int, *, height: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns images (n, 3, height, width) and a label per pixel; about 1 / (classes + 1) are unlabelled."""
    labels = torch.randint(classes + 1, (n, height, width))
    return torch.randn(n, 3, height, width), labels.masked_fill(labels == classes, _UNLABELLED)


def _pixel_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    found = model(images)
    logits, *auxiliary = found if isinstance(found, tuple) else (found,)
    loss = functional.cross_entropy(logits, labels, ignore_index=_UNLABELLED)
    for one in auxiliary:
        loss = loss + _AUXILIARY_SHARE * functional.cross_entropy(one, labels, ignore_index=_UNLABELLED)
    return loss
