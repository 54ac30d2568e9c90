"""Cases with models of transformers, small and from their configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Loss,
    Training,
    add,
    event_case,
    loss_case,
    step_case,
    update,
)

MODELS = "transformers"
PACKAGE: dict[str, Any] = {"package": "transformers"}
LAYERS, HEADS, INNER = 2, 4, 64
# Larger than in training from scratch, so that attention, and thus its mask, matters from the first step.
SPREAD = 0.2


def _bert(dropout: float = 0.0, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=4 * LENGTH,
        num_labels=CLASSES,
        initializer_range=SPREAD,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    return BertForSequenceClassification(config).train()


def _gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=4 * LENGTH,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=SPREAD,
        bos_token_id=0,
        eos_token_id=0,
        **{"use_cache": False, **options},
    )
    return GPT2LMHeadModel(config).train()


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=SPREAD,
        **{"use_cache": False, **options},
    )
    return LlamaForCausalLM(config).train()


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).train()


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        use_cache=False,
    )
    return MixtralForCausalLM(config).train()


def _wav2vec() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        conv_dim=(HIDDEN, HIDDEN),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        ctc_zero_infinity=True,
        mask_time_length=2,
        layerdrop=0.3,
    )
    return Wav2Vec2ForCTC(config).train()


# --- losses --------------------------------------------------------------------------------------------------------


def _mask(training: Training, padded: str) -> Tensor:
    """Returns a mask of tokens, of which some are padding: "never", "later", "always" or "before"."""
    is_padded = {
        "never": False,
        "always": True,
        "later": training.number >= EVENT_AT,
        "before": training.number < EVENT_AT,
    }[padded]
    mask = torch.ones(len(training.tokens()), LENGTH, dtype=torch.long, device=training.device)
    if is_padded:
        mask[::2, LENGTH - 4 :] = 0
    return mask


def _classified(padded: str) -> Loss:
    def loss(training: Training, _: Tensor, y: Tensor) -> Tensor:
        return training.called(input_ids=training.tokens(), attention_mask=_mask(training, padded), labels=y).loss

    return loss


def _continued(padded: str, *, by_hand: bool = False) -> Loss:
    """The loss of the next tokens, by the model or, as a Trainer with a loss of its own has it, by hand."""

    def loss(training: Training, _: Tensor, __: Tensor) -> Tensor:
        tokens, mask = training.tokens(), _mask(training, padded)
        labels = tokens.masked_fill(mask == 0, -100)
        if not by_hand:
            return training.called(input_ids=tokens, attention_mask=mask, labels=labels).loss
        logits = training.called(input_ids=tokens, attention_mask=mask).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return loss


for _padded in ("never", "always", "later", "before"):
    add(MODELS, f"bert_padded_{_padded}", model=_bert, loss=_classified(_padded), **PACKAGE)
    add(MODELS, f"llama_padded_{_padded}", model=_llama, loss=_continued(_padded), **PACKAGE)
for _padded in ("never", "later"):
    add(MODELS, f"gpt2_padded_{_padded}", model=_gpt2, loss=_continued(_padded), **PACKAGE)
    add(MODELS, f"t5_padded_{_padded}", model=_t5, loss=_continued(_padded), **PACKAGE)
add(MODELS, "llama_loss_by_hand", model=_llama, loss=_continued("later", by_hand=True), **PACKAGE)
add(MODELS, "mixtral", model=_mixtral, loss=_continued("never"), **PACKAGE)
add(MODELS, "bert_with_dropout", model=lambda: _bert(0.1), loss=_classified("later"), **PACKAGE)
add(MODELS, "bert_eager", model=lambda: _bert(attn_implementation="eager"), loss=_classified("later"), **PACKAGE)
add(MODELS, "gpt2_with_cache", model=lambda: _gpt2(use_cache=True), loss=_continued("never"), **PACKAGE)
add(MODELS, "llama_with_cache", model=lambda: _llama(use_cache=True), loss=_continued("never"), **PACKAGE)
add(
    MODELS,
    "gpt2_attention_upcast",
    model=lambda: _gpt2(reorder_and_upcast_attn=True, attn_implementation="eager"),
    loss=_continued("never"),
    **PACKAGE,
)
add(
    MODELS,
    "llama_rope_dynamic",
    model=lambda: _llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    loss=_continued("never"),
    event=lambda training: _evaluated_on_longer(training),
    **PACKAGE,
)


def _evaluated_on_longer(training: Training) -> None:
    """A longer sequence has a dynamic RoPE make its frequencies anew; the next shorter one puts them back."""
    training.called.eval()
    with torch.no_grad():
        training.called(input_ids=training.tokens(length=2 * LENGTH))
    training.called.train()


@event_case(MODELS, model=_llama, loss=_continued("never"), **PACKAGE)
def llama_evaluated_on_longer(training: Training) -> None:
    _evaluated_on_longer(training)


@event_case(MODELS, model=_llama, loss=_continued("later"), **PACKAGE)
def attention_implementation_changed(training: Training) -> None:
    training.model.set_attn_implementation("eager")


@event_case(MODELS, model=lambda: _bert(0.1), loss=_classified("never"), **PACKAGE)
def checkpointing_enabled_later(training: Training) -> None:
    training.model.gradient_checkpointing_enable({"use_reentrant": False})


@event_case(MODELS, model=_gpt2, loss=_continued("never"), **PACKAGE)
def embeddings_resized(training: Training) -> None:
    training.model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    training.restart_optimizer()


@loss_case(MODELS, model=_gpt2, **PACKAGE)
def hidden_states_asked_for(training: Training, _: Tensor, __: Tensor) -> Tensor:
    """Uses what the model returns beside its loss, from a step on."""
    outputs = training.called(input_ids=training.tokens(), labels=training.tokens(), output_hidden_states=True)
    if training.number < EVENT_AT:
        return outputs.loss
    return outputs.loss + 0.1 * outputs.hidden_states[1].square().mean()


@step_case(MODELS, model=_gpt2, **PACKAGE)
def generates_in_between(training: Training) -> Tensor:
    tokens = training.tokens()
    loss = update(training, training.called(input_ids=tokens, labels=tokens).loss)
    if training.number % 10 != 9:
        return loss
    training.model.eval()
    with torch.no_grad():
        made = training.model.generate(
            tokens[:2, :4], max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0
        )
    training.model.train()
    return torch.stack([loss, made.float().mean()])


def _speech_loss(training: Training, _: Tensor, __: Tensor) -> Tensor:
    sound = torch.randn(4, 2000, generator=torch.Generator("cpu").manual_seed(training.number), device="cpu")
    return training.called(input_values=sound.to(training.device), labels=training.tokens()[:4, :4]).loss


add(MODELS, "wav2vec_with_layers_dropped", model=_wav2vec, loss=_speech_loss, **PACKAGE)


@loss_case(MODELS, model=_llama, tolerance=0.1, **PACKAGE)
def llama_under_autocast(training: Training, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(training.device.type, dtype=torch.bfloat16):
        return _continued("later")(training, x, y)
