"""Eight models from torchvision, timm and transformers that amptune was not developed with, as targets.

    amptune tune reports/foreign_models.py:swin_t --budget 120s

They were chosen before anything was measured, one for each kind of layer that the bundled workloads lack. Weights are
random, built from configurations; data is synthetic; batches are as one would train them on an H200. Each model's
library is imported when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import adamw, classification, cross_entropy, in_memory, sgd

_IMAGE_CLASSES, _VIDEO_CLASSES = 1000, 400
_LLAMA_VOCABULARY, _T5_VOCABULARY = 32000, 32128


def swin_t() -> Workload:
    """Attention in shifted windows (Liu et al., 2021, arXiv:2103.14030)."""
    return replace(_images("swin_t", partial(torchvision_model, "swin_t"), batch_size=128), optimizer=adamw)


def convnext_tiny() -> Workload:
    """Depthwise 7×7 convolutions and LayerNorm (Liu et al., 2022, arXiv:2201.03545)."""
    return replace(
        _images("convnext_tiny", partial(torchvision_model, "convnext_tiny"), batch_size=128), optimizer=adamw
    )


def efficientnet_v2_s() -> Workload:
    """Depthwise convolutions with squeeze and excitation (Tan and Le, 2021, arXiv:2104.00298)."""
    return _images("efficientnet_v2_s", partial(torchvision_model, "efficientnet_v2_s"), batch_size=128)


def regnet_y_3_2gf() -> Workload:
    """Grouped convolutions (Radosavovic et al., 2020, arXiv:2003.13678)."""
    return _images("regnet_y_3_2gf", partial(torchvision_model, "regnet_y_3_2gf"), batch_size=128)


def vit_small_patch16_224() -> Workload:
    """A vision transformer from timm (Dosovitskiy et al., 2020, arXiv:2010.11929)."""
    name = "vit_small_patch16_224"
    return replace(_images(name, partial(timm_model, name), batch_size=256), optimizer=adamw)


def r3d_18() -> Workload:
    """Convolutions over space and time (Tran et al., 2017, arXiv:1711.11248); 16 frames of 112²."""

    def model() -> nn.Module:
        from torchvision.models import video  # type: ignore[import-not-found,unused-ignore]

        built: nn.Module = video.r3d_18(weights=None)
        return built

    return Workload(
        name="r3d_18",
        model=model,
        batch=_videos,
        loader=partial(in_memory, batch=_videos),
        loss=cross_entropy,
        optimizer=sgd,
        batch_size=32,
    )


def llama_150m() -> Workload:
    """A causal decoder with rotary positions (Touvron et al., 2023, arXiv:2302.13971), small: 148 M parameters."""

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=_LLAMA_VOCABULARY,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=14,
            num_attention_heads=12,
            max_position_embeddings=512,
            use_cache=False,
        )
        built: nn.Module = LlamaForCausalLM(config)
        return built

    return text("llama_150m", model, _continued, batch_size=8)


def t5_base() -> Workload:
    """An encoder and a decoder (Raffel et al., 2019, arXiv:1910.10683); 512 tokens in, 128 out."""

    def model() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=_T5_VOCABULARY,
            d_model=768,
            d_ff=3072,
            num_layers=12,
            num_heads=12,
            decoder_start_token_id=0,
            use_cache=False,
        )
        built: nn.Module = T5ForConditionalGeneration(config)
        return built

    return text("t5_base", model, _translated, batch_size=16)


def torchvision_model(name: str, **options: Any) -> nn.Module:
    from torchvision import models  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

    built: nn.Module = models.get_model(name, weights=None, **options)
    return built


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

    built: nn.Module = timm.create_model(name, pretrained=False, **options)
    return built


def _images(name: str, model: Callable[[], nn.Module], *, batch_size: int) -> Workload:
    return classification(name=name, model=model, classes=_IMAGE_CLASSES, side=224, batch_size=batch_size)


def _videos(n: int) -> tuple[Tensor, Tensor]:
    """Returns videos of shape (n, 3, frames, height, width) and labels of shape (n,)."""
    return torch.randn(n, 3, 16, 112, 112), torch.randint(_VIDEO_CLASSES, (n,))


def text(name: str, model: Callable[[], nn.Module], batch: Callable[[int], Any], *, batch_size: int) -> Workload:
    return Workload(
        name=name,
        model=model,
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=own_loss,
        optimizer=adamw,
        batch_size=batch_size,
    )


def _continued(n: int) -> dict[str, Tensor]:
    tokens = torch.randint(_LLAMA_VOCABULARY, (n, 512))
    return {"input_ids": tokens, "labels": tokens}


def _translated(n: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(_T5_VOCABULARY, (n, 512)),
        "labels": torch.randint(_T5_VOCABULARY, (n, 128)),
    }


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss that a model of transformers computes if it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss
