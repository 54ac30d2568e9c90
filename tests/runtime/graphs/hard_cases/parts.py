"""Parts of PyTorch that keep state, autograd functions of people's own, and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import HIDDEN, LATER, LENGTH, ROWS, VOCABULARY, WIDTH, Cases, Training, Why, fading, loss_of

case = Cases("parts of PyTorch")


# --- parametrizations and scripts ----------------------------------------------------------------------------------


class Fading(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * fading(self.calls)


def cached(t: Training, x: Tensor, y: Tensor) -> Tensor:
    with parametrize.cached():
        return loss_of(t.called(x), y) + loss_of(t.called(x + 0.1), y)


def normed(own: Any) -> Any:
    return parametrizations.weight_norm(own.body)


def unnormed(t: Training) -> None:
    parametrize.remove_parametrizations(t.model.body, "weight")
    t.restart_optimizer()


def scripted(own: Any) -> None:
    own.add_module("body", torch.jit.script(nn.Linear(WIDTH, HIDDEN)))


case("spectral_norm", build=lambda own: parametrizations.spectral_norm(own.body))
case("spectral_norm_by_hook", build=lambda own: spectral_norm(own.body), why=Why.HOOK)
case("fading", build=lambda own: parametrize.register_parametrization(own.head, "weight", Fading()), why=Why.AGAIN)
case("parametrization_cached", build=normed, loss=cached, when=LATER)
case("parametrization_added", event=lambda t: (normed(t.model), t.restart_optimizer()))
case("parametrization_removed", build=normed, event=unnormed)
case("script", build=scripted, why="a TorchScript module")


# --- tokens: recurrence, tables, attention --------------------------------------------------------------------------


def over_tokens(name: str, make: Any, forward: Callable[..., Tensor], given: Any = None, **options: Any) -> None:
    """Adds a model that embeds tokens and takes the logits of what `forward` makes of them by a part."""

    def build(own: Any) -> None:
        own.embed, own.part = nn.Embedding(VOCABULARY, HIDDEN), make()

    def embedded(own: Any, tokens: Tensor, *more: Any) -> Tensor:
        return own.head(forward(own, own.embed(tokens), *more))

    def loss(t: Training, _: Tensor, y: Tensor) -> Tensor:
        return loss_of(t.called(t.tokens(), *(() if given is None else (given(t),))), y)

    case(name, **{"build": build, "forward": embedded, "loss": loss, **options})


def last(own: Any, embedded: Tensor) -> Tensor:
    return own.part(embedded)[0][:, -1]


def packed(own: Any, embedded: Tensor, lengths: Tensor) -> Tensor:
    sequence = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(own.part(sequence)[0], batch_first=True)[0].sum(1)


def attended(own: Any, embedded: Tensor, padding: Tensor) -> Tensor:
    return own.part(embedded, src_key_padding_mask=padding).mean(1)


def flatten(t: Training) -> None:
    for weight in t.model.part.parameters():
        weight.data = weight.data.clone()
    t.model.part.flatten_parameters()


def table(**options: Any) -> Any:
    """Returns what builds the table of tokens with these options."""

    def build(own: Any) -> None:
        own.embed = nn.Embedding(VOCABULARY, HIDDEN, **options)

    return build


lstm = partial(nn.LSTM, HIDDEN, HIDDEN, num_layers=2, batch_first=True)
encoder = partial(nn.TransformerEncoderLayer, HIDDEN, 4, 64, dropout=0.0, batch_first=True)
over_tokens("lstm_flattened_again", lstm, last, event=flatten, on_cpu=None)
# cuDNN keeps the state of its own generator.
over_tokens("lstm_with_dropout", partial(lstm, dropout=0.3), last, why=Why.WAITS, ends=True, on_cpu=None)
over_tokens(
    "packed",
    lstm,
    packed,
    lambda t: torch.arange(ROWS, device="cpu") % 5 + 1 + t.number % 3,
    why=Why.SILENT,
    on_cpu=None,
)
over_tokens("padding", encoder, attended, lambda t: t.tokens() < (5 if t.is_late else 0))
of_mean = partial(over_tokens, make=nn.Identity, forward=lambda _, embedded: torch.tanh(embedded.mean(1)))
# The table is normalized in place at the rows that are read.
of_mean("renormed_table", build=table(max_norm=1.0), why=Why.WRITES)


of_own = Cases("autograd functions", "function_")
STATE: dict[str, Any] = {"calls": 0, "strength": 1.0}


class Changed(torch.autograd.Function):
    """Gives on what a block makes of its input; the gradient is changed by a function of that, input and block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any, block: Any) -> Tensor:
        ctx.change, ctx.block = change, block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(gradient, *ctx.saved_tensors, ctx.block), None, None


def function(name: str, change: Any, why: str = "", **options: Any) -> None:
    def build(own: Any) -> None:
        STATE["calls"] = 0
        own.block = nn.Linear(HIDDEN, HIDDEN, bias=False)
        own.block.register_buffer("seen", torch.ones(()))

    def forward(own: Any, x: Tensor) -> Tensor:
        return own.head(Changed.apply(own.hidden(x), change, own.block))

    of_own(name, build=build, forward=forward, why=why, **options)


def counting(gradient: Tensor, *_: Any) -> Tensor:
    STATE["calls"] += 1
    return gradient * fading(STATE["calls"])


def recomputing(gradient: Tensor, x: Tensor, block: nn.Module) -> Any:
    """Runs its block again in the backward pass, as reversible networks do."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        torch.autograd.backward(block(x), gradient)
    return x.grad


def penalized_step(t: Training) -> Tensor:
    STATE["penalty"] = torch.full((HIDDEN,), 0.01 * fading(t.number), device=t.device)
    return t.plain()


function("counts", counting, Why.EFFECT)
function("rounds", lambda gradient, *_: gradient)
function("writes_to_buffer", lambda g, _, block: g / (0.1 + block.seen.lerp_(g.abs().mean(), 0.1)))
function(
    "strength_elsewhere",
    lambda g, *_: -STATE["strength"] * g,
    Why.DIFFERS,
    event=lambda t: t.patch(STATE, "strength", 0.1),
)
function("tensor_elsewhere", lambda g, *_: g + STATE["penalty"], Why.ELSEWHERE, step=penalized_step)
function("recomputes", recomputing, Why.ELSEWHERE)


models = Cases("transformers", package="transformers", on_cpu=None)
# Weights are larger than in training from scratch, so that attention, and thus its mask, matters from the first step.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
    "use_cache": False, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}  # fmt: skip


def of_model(name: str, kind: str = "Llama", change: Any = None, why: str = "", **known: Any) -> None:
    """Adds a small causal model that learns its tokens, of which some are padding later."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **known})
        return getattr(transformers, f"{kind}ForCausalLM")(config).train()

    def step(t: Training) -> Tensor:
        mask = torch.ones_like(t.tokens())
        mask[::2, LENGTH - 4 :] = 0 if t.is_late else 1
        return t.update(t.called(input_ids=t.tokens(), attention_mask=mask, labels=t.tokens()).loss)

    models(f"{kind.lower()}_{name}", model=make, step=step, event=change, why=why)


def evaluate_longer(t: Training) -> None:
    t.evaluated(input_ids=t.tokens(length=2 * LENGTH))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
of_model("padded_later")
of_model("with_cache", why=Why.UNKNOWN, use_cache=True)
of_model("with_dynamic_rope", change=evaluate_longer, why=Why.ELSEWHERE, rope_scaling=DYNAMIC)
of_model("attention_changed", change=lambda t: t.model.set_attn_implementation("eager"), why=Why.WAITS)
of_model("checkpointed_later", change=lambda t: t.model.gradient_checkpointing_enable({"use_reentrant": False}))
of_model("of_experts", "Mixtral", why=Why.WAITS, num_local_experts=4)
