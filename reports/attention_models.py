"""Models whose steps attention is much of, chosen before any was run: long sequences, wide heads, masks, shared keys.

Built from configurations, with random weights; data is synthetic.
"""

from __future__ import annotations

import torch
from foreign_models import text  # beside this program
from torch import Tensor, nn

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import classification

VOCABULARY = 32000


def long_decoder() -> Workload:
    """2,048 tokens, 8 heads of 128."""
    return _decoder("long_decoder", tokens=2048, batch_size=4, num_attention_heads=8)


def grouped_decoder() -> Workload:
    """1,024 tokens, 16 heads of 64 that share the keys and values of 4 (Ainslie et al., 2023, arXiv:2305.13245)."""
    return _decoder("grouped_decoder", tokens=1024, batch_size=8, num_attention_heads=16, num_key_value_heads=4)


def padded_encoder() -> Workload:
    """BERT's base architecture on 512 tokens, of which a mask leaves out what is padding."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        built: nn.Module = BertForMaskedLM(BertConfig(num_hidden_layers=8))
        return built

    def batch(n: int) -> dict[str, Tensor]:
        tokens = torch.randint(1000, 30000, (n, 512))
        kept = torch.arange(512) < torch.randint(128, 513, (n, 1))
        return {"input_ids": tokens * kept, "attention_mask": kept.long(), "labels": tokens}

    return text("padded_encoder", model, batch, batch_size=16)


def large_pictures() -> Workload:
    """ViT-B on pictures of 384 × 384, 577 tokens (Dosovitskiy et al., 2020, arXiv:2010.11929)."""

    def model() -> nn.Module:
        import timm  # type: ignore[import-not-found,unused-ignore]  # no dependency of amptune

        built: nn.Module = timm.create_model("vit_base_patch16_384", pretrained=False)
        return built

    return classification(name="large_pictures", model=model, classes=1000, side=384, batch_size=32)


def _decoder(name: str, *, tokens: int, batch_size: int, **heads: int) -> Workload:
    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=8,
            max_position_embeddings=tokens,
            use_cache=False,
            **heads,
        )
        built: nn.Module = LlamaForCausalLM(config)
        return built

    def batch(n: int) -> dict[str, Tensor]:
        drawn = torch.randint(VOCABULARY, (n, tokens))
        return {"input_ids": drawn, "labels": drawn}

    return text(name, model, batch, batch_size=batch_size)
