"""Models of torchvision, timm and transformers: each trains as well in half precision as in FP32.

The numbers of the numerics gate were chosen on the forty `packages`; the thirty `others` were named before any of them
was run, and so were the thirty `later` ones, after the gate had got a second look. They are small: pictures of 64 × 64,
sentences of 24 tokens; a class, or the next token, can be learned of them. Those of `full_size` are trained on 64
pictures of 224 × 224 and labels without a meaning: what is allowed of a gradient that is next to nothing was chosen on
the first 27, and the other 16 were named before any of them was run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import labelled_images

__all__ = ["MODELS"]

CLASSES, PIXELS, FULL_PIXELS = 8, 64, 224
VOCABULARY, TOKENS, WIDTH = 96, 24, 64


@cache
def _patterns() -> Tensor:
    """One smooth picture per class."""
    coarse = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(PIXELS, PIXELS), mode="bilinear")


def _pictures(n: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (n,))
    return torch.randn(n, 3, PIXELS, PIXELS) + _patterns()[labels], labels


def _classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    found = model(pictures)
    if isinstance(found, tuple):  # GoogLeNet has two more heads
        first, *others = found
        return F.cross_entropy(first, labels) + sum(0.3 * F.cross_entropy(one, labels) for one in others)
    return F.cross_entropy(getattr(found, "logits", found), labels)


def _segmented(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    found = model(pictures)["out"]
    return F.cross_entropy(found, labels[:, None, None].expand(-1, *found.shape[2:]))


def _sentences(n: int) -> Tensor:
    """Arithmetic sequences of tokens."""
    first, step = torch.randint(VOCABULARY, (n, 1)), torch.randint(1, 8, (n, 1))
    return (first + step * torch.arange(TOKENS)) % (VOCABULARY - 3) + 3


def _labelled(n: int) -> tuple[Tensor, Tensor]:
    tokens = _sentences(n)
    return tokens, tokens[:, 0] % CLASSES


def _told_apart(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = batch
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _continued(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-4)


def _of_pictures(model: Callable[[], nn.Module], optimizer: Any = _sgd, loss: Any = _classified) -> Workload:
    return Workload(model=model, batch=_pictures, loss=loss, optimizer=optimizer, batch_size=16)


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model


def _torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES, weights=None, **options)
    return model


def _segmenter() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        num_classes=CLASSES, weights=None, weights_backbone=None
    )
    return model


def _transformer(kind: str, task: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    model: nn.Module = getattr(transformers, f"{kind}{task}")(config)
    return model


_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}
_GPT: Mapping[str, Any] = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
_T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_ff": 2 * WIDTH,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
}
_DISTIL: Mapping[str, Any] = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}


def _decoder(kind: str, task: str = "ForCausalLM", **options: Any) -> Workload:
    model = partial(_transformer, kind, task, **(options or _SMALL))
    return Workload(model=model, batch=_sentences, loss=_continued, optimizer=_adamw, batch_size=16)


def _encoder(kind: str, **options: Any) -> Workload:
    model = partial(
        _transformer, kind, "ForSequenceClassification", num_labels=CLASSES, pad_token_id=0, **(options or _SMALL)
    )
    return Workload(model=model, batch=_labelled, loss=_told_apart, optimizer=_adamw, batch_size=16)


def _all() -> dict[str, Workload]:
    convolutions = ("resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "densenet121")
    found = {
        name: _of_pictures(partial(_torchvision, name)) for name in (*convolutions, "regnet_y_400mf", "efficientnet_b0")
    }
    found["googlenet"] = _of_pictures(partial(_torchvision, "googlenet", init_weights=False))
    found["swin_t"] = _of_pictures(partial(_torchvision, "swin_t"), _adamw)
    found["convnext_tiny"] = _of_pictures(partial(_torchvision, "convnext_tiny"), _adamw)
    found["lraspp"] = _of_pictures(_segmenter, loss=_segmented)
    newer = ("mobilenetv3_small_050", "efficientnet_lite0", "resnest14d", "ghostnet_050", "repvgg_a0")
    found |= {name: _of_pictures(partial(_timm, name)) for name in (*newer, "res2net50_26w_4s", "nf_regnet_b0")}
    mixed = ("edgenext_xx_small", "mobilevit_xxs", "poolformer_s12", "pvt_v2_b0")
    found |= {name: _of_pictures(partial(_timm, name), _adamw) for name in mixed}
    of_one_size = ("vit_tiny_patch16_224", "cait_xxs24_224", "mixer_s32_224", "gmlp_ti16_224", "coat_tiny")
    found |= {name: _of_pictures(partial(_timm, name, img_size=PIXELS), _adamw) for name in of_one_size}
    found["xcit_nano_12_p16_224"] = _of_pictures(partial(_timm, "xcit_nano_12_p16_224"), _adamw)
    found |= {kind.lower(): _decoder(kind) for kind in ("Llama", "GPTNeoX")}
    found["qwen2"] = _decoder("Qwen2", **_SMALL, num_key_value_heads=2)
    found["gpt2"] = _decoder("GPT2", "LMHeadModel", **_GPT)
    found["opt"] = _decoder("OPT", **_SMALL, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, pad_token_id=0)
    found["t5"] = _decoder("T5", "ForConditionalGeneration", **_T5)
    found["bart"] = _decoder("Bart", "ForConditionalGeneration", **_BART)
    found |= {kind.lower(): _encoder(kind) for kind in ("Bert", "Electra", "Albert")}
    found["distilbert"] = _encoder("DistilBert", **_DISTIL)
    return found


def _others() -> dict[str, Workload]:
    convolutions = ("alexnet", "resnet34", "vgg11_bn", "mobilenet_v3_small", "shufflenet_v2_x1_0", "regnet_x_400mf")
    found = {name: _of_pictures(partial(_torchvision, name)) for name in (*convolutions, "resnext50_32x4d")}
    found["swin_v2_t"] = _of_pictures(partial(_torchvision, "swin_v2_t"), _adamw)
    newer = (
        "skresnet18",
        "dla34",
        "tinynet_e",
        "lcnet_050",
        "fbnetc_100",
        "ese_vovnet19b_dw",
        "mobileone_s0",
        "resnet26d",
    )
    found |= {name: _of_pictures(partial(_timm, name)) for name in newer}
    found |= {name: _of_pictures(partial(_timm, name), _adamw) for name in ("fastvit_t8", "convnextv2_atto")}
    of_one_size = ("deit_tiny_patch16_224", "resmlp_12_224")
    found |= {name: _of_pictures(partial(_timm, name, img_size=PIXELS), _adamw) for name in of_one_size}
    found["mistral"] = _decoder("Mistral", **_SMALL, num_key_value_heads=2)
    found["phi"] = _decoder("Phi", **_SMALL)
    found["gpt_bigcode"] = _decoder("GPTBigCode", **_GPT)
    found["bloom"] = _decoder("Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4)
    found["pegasus"] = _decoder("Pegasus", "ForConditionalGeneration", **_BART)
    found["mt5"] = _decoder("MT5", "ForConditionalGeneration", **_T5)
    found |= {kind.lower(): _encoder(kind) for kind in ("Roberta", "DebertaV2", "RoFormer", "ConvBert")}
    return found


def _later() -> dict[str, Workload]:
    convolutions = (
        *("resnet14t", "regnetx_002", "regnety_002", "mobilenetv2_050", "mobilenetv3_small_075", "semnasnet_075"),
        *("tinynet_d", "hardcorenas_b", "seresnet18", "dpn48b", "repghostnet_050", "mobilenetv4_conv_small_050"),
        *("ghostnetv3_050", "gernet_s", "rexnetr_100", "hgnet_tiny", "selecsls42b", "ecaresnet26t"),
    )
    mixed = ("efficientvit_m0", "convnext_femto", "inception_next_atto", "mambaout_femto", "starnet_s1")
    found = {name: _of_pictures(partial(_timm, name)) for name in convolutions}
    found |= {
        name: _of_pictures(partial(_timm, name), _adamw) for name in (*mixed, "tiny_vit_5m_224", "poolformerv2_s12")
    }
    found["gemma"] = _decoder("Gemma", **_SMALL, num_key_value_heads=2, head_dim=16)
    found["falcon"] = _decoder("Falcon", **_SMALL)
    found["stablelm"] = _decoder("StableLm", **_SMALL, num_key_value_heads=2)
    found |= {kind.lower(): _encoder(kind) for kind in ("Camembert", "Nystromformer")}
    return found


def _full_size() -> dict[str, Workload]:
    names = (
        *("mobilenetv3_large_100", "mobilenetv2_100", "efficientnet_b0", "efficientnet_lite0", "mnasnet_100"),
        *("ghostnet_100", "fbnetc_100", "tf_efficientnetv2_b0", "regnety_008", "lcnet_100", "convnext_atto"),
        *("semnasnet_100", "mobilenetv3_small_100", "mixnet_s", "spnasnet_100", "rexnet_100", "tinynet_a"),
        *("hardcorenas_a", "mobileone_s0", "repvgg_a0", "densenet121", "resnet50", "regnetx_008", "efficientvit_b0"),
        *("mobilevit_s", "xcit_nano_12_p16_224", "edgenext_small"),
        # those on which nothing was chosen
        *("tf_mobilenetv3_large_075", "mobilenetv4_conv_small", "efficientnet_es", "ghostnetv2_100", "fbnetv3_b"),
        *("mnasnet_small", "lcnet_075", "skresnet18", "dla34", "ese_vovnet19b_dw", "levit_128", "fastvit_t8"),
        *("repvit_m0_9", "efficientformer_l1", "mobilenet_edgetpu_v2_s", "hgnetv2_b0"),
    )
    return {name: _of_full_size(name) for name in names}


def _of_full_size(name: str) -> Workload:
    return Workload(
        model=partial(_timm, name),
        batch=partial(labelled_images, side=FULL_PIXELS, classes=CLASSES),
        loss=_classified,
        optimizer=_sgd,
        batch_size=64,
    )


MODELS: Mapping[str, Mapping[str, Workload]] = {
    "packages": _all(),
    "others": _others(),
    "later": _later(),
    "full_size": _full_size(),
}
