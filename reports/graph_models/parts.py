"""Cases with parts of PyTorch that keep state: parametrizations, scripts, recurrence, sparsity, autograd functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Net,
    Passing,
    Training,
    add,
    event_case,
    fading,
    loss_case,
    loss_of,
    model_case,
    step_case,
    update,
)

PARTS, FUNCTIONS = "parts of PyTorch", "autograd functions"


# --- parametrizations ----------------------------------------------------------------------------------------------


add(PARTS, "spectral_norm", build=lambda net: parametrizations.spectral_norm(net.body))
add(PARTS, "spectral_norm_by_hook", build=lambda net: spectral_norm(net.body))


@model_case(PARTS)
class WeightNorm(Net):
    def build(self) -> None:
        parametrizations.weight_norm(self.body)


add(PARTS, "weight_norm_by_hook", build=lambda net: weight_norm(net.body))
add(PARTS, "orthogonal", build=lambda net: parametrizations.orthogonal(net.body))


class _Fading(nn.Module):
    """Fades with each time that the weight is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * fading(self.calls)


@model_case(PARTS)
class FadingParametrization(Net):
    def build(self) -> None:
        parametrize.register_parametrization(self.head, "weight", _Fading(), unsafe=True)


@loss_case(PARTS, model=WeightNorm)
def parametrizations_cached(training: Training, x: Tensor, y: Tensor) -> Tensor:
    if training.number % 3 == 0:
        return loss_of(training.called(x), y)
    with parametrize.cached():
        return loss_of(training.called(x), y) + loss_of(training.called(x + 0.1), y)


class CachesInside(WeightNorm):
    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return super().forward(x) + super().forward(x + 0.1)


add(PARTS, "parametrizations_cached_inside", model=CachesInside)


@event_case(PARTS)
def parametrization_added(training: Training) -> None:
    parametrizations.weight_norm(training.model.body)
    training.restart_optimizer()


@event_case(PARTS, model=WeightNorm)
def parametrization_removed(training: Training) -> None:
    parametrize.remove_parametrizations(training.model.body, "weight")
    training.restart_optimizer()


# --- scripts and lazy modules --------------------------------------------------------------------------------------


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0
        self.body = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if self.gain > 0.5:
            return hidden
        return hidden * self.gain


class Scripted(Net):
    def build(self) -> None:
        self.add_module("body", torch.jit.script(_Gated()))

    def hidden(self, x: Tensor) -> Tensor:
        return self.body(x)


add(PARTS, "attribute_of_script_changed", model=Scripted, event=lambda t: setattr(t.model.body, "gain", 0.25))


@model_case(PARTS)
class ScriptedLayer(Scripted):
    pass


@model_case(PARTS)
class TracedLayer(Net):
    def build(self) -> None:
        self.add_module("body", torch.jit.trace(nn.Linear(WIDTH, HIDDEN), torch.ones(ROWS, WIDTH)))


@model_case(PARTS, moved=True)
class ScriptedFunction(Net):
    """A scripted function specializes after two calls."""

    def build(self) -> None:
        self.scripts = [torch.jit.script(_scripted)]

    def forward(self, x: Tensor) -> Any:
        return self.head(self.scripts[0](self.hidden(x)))


def _scripted(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x + torch.tanh(x).relu()


# --- recurrence ----------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    kind: Any = nn.LSTM
    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = self.kind(WIDTH, HIDDEN, num_layers=2, batch_first=True, dropout=self.dropout)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.body(self.embed(tokens))[0][:, -1])


def _tokens_loss(training: Training, _: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(training.tokens()), y)


@model_case(PARTS, loss=_tokens_loss)
class Lstm(Recurrent):
    pass


@model_case(PARTS, loss=_tokens_loss)
class Gru(Recurrent):
    kind = nn.GRU


@model_case(PARTS, loss=_tokens_loss)
class LstmWithDropout(Recurrent):
    """cuDNN keeps the state of its own generator for it."""

    dropout = 0.3


@model_case(PARTS, loss=_tokens_loss)
class LstmWithState(Recurrent):
    """Goes on from the state that its last pass left."""

    state: Any = None

    def forward(self, tokens: Tensor) -> Any:
        hidden, state = self.body(self.embed(tokens), self.state)
        self.state = tuple(one.detach() for one in state)
        return self.head(hidden[:, -1])


class Packed(Recurrent):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=LENGTH)
        return self.head(hidden.sum(1))


def _packed_loss(training: Training, _: Tensor, y: Tensor) -> Tensor:
    lengths = torch.arange(ROWS, device="cpu") % 5 + 1 + training.number % 3
    return loss_of(training.called(training.tokens(), lengths), y)


add(PARTS, "packed_by_lengths_of_host", model=Packed, loss=_packed_loss)


@event_case(PARTS, model=Recurrent, loss=_tokens_loss)
def weights_of_lstm_flattened_again(training: Training) -> None:
    for weight in training.model.body.parameters():
        weight.data = weight.data.clone()
    training.model.body.flatten_parameters()


class Unrolled(nn.Module):
    """A cell that is called for each token, and its state in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Any:
        state = torch.zeros(len(tokens), HIDDEN, device=tokens.device)
        for token in self.embed(tokens).unbind(1):
            state = self.cell(token, state)
        return self.head(state)


add(PARTS, "unrolled_cell", model=Unrolled, loss=_tokens_loss)


# --- sparse and large tables ---------------------------------------------------------------------------------------


class Bag(nn.Module):
    is_sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, HIDDEN, sparse=self.is_sparse)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.bag(tokens)))


@model_case(PARTS, loss=_tokens_loss)
class BagOfTokens(Bag):
    pass


class SparseBag(Bag):
    is_sparse = True


@step_case(PARTS, model=SparseBag)
def sparse_gradients(training: Training) -> Tensor:
    model: Any = training.model
    sparse = training.once("sparse", lambda: torch.optim.SparseAdam(list(model.bag.parameters()), lr=0.01))
    sparse.zero_grad()
    model.head.zero_grad()
    loss = loss_of(training.called(training.tokens()), training.batch()[1])
    loss.backward()
    sparse.step()
    with torch.no_grad():
        for weight in model.head.parameters():
            weight.sub_(weight.grad, alpha=0.05)
    model.bag.weight.grad = None
    return loss.detach()


@model_case(PARTS, loss=_tokens_loss)
class EmbeddingRenormed(nn.Module):
    """Its table is normalized in place at the rows that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, HIDDEN, max_norm=1.0), nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.table(tokens)).mean(1))


@model_case(PARTS)
class BufferOfSparse(Net):
    def build(self) -> None:
        self.register_buffer("graph", torch.eye(ROWS).to_sparse())

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.sparse.mm(self.graph, self.hidden(x)))


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, targets: Tensor, lengths: Any) -> Any:
        log_chances = self.net(x.unsqueeze(0).expand(2 * LENGTH, -1, -1)).log_softmax(2)
        whole: Any = [2 * LENGTH] * len(x)
        if isinstance(lengths, Tensor):
            whole = torch.full_like(lengths, 2 * LENGTH)
        return functional.ctc_loss(log_chances, targets, whole, lengths, zero_infinity=True)


@loss_case(PARTS, model=Ctc)
def ctc_with_lengths_in_list(training: Training, x: Tensor, y: Tensor) -> Tensor:
    lengths = [2 + (training.number + row) % 3 for row in range(len(x))]
    return loss_of(training.called(x, training.tokens()[:, :4], lengths), y)


@loss_case(PARTS, model=Ctc)
def ctc_with_lengths_on_host(training: Training, x: Tensor, y: Tensor) -> Tensor:
    lengths = 2 + (training.number + torch.arange(len(x), device="cpu")) % 3
    return loss_of(training.called(x, training.tokens()[:, :4], lengths), y)


@loss_case(PARTS, model=Ctc)
def ctc_with_lengths_on_device(training: Training, x: Tensor, y: Tensor) -> Tensor:
    lengths = 2 + (training.number + torch.arange(len(x), device=x.device)) % 3
    return loss_of(training.called(x, training.tokens()[:, :4], lengths), y)


class Adaptive(Net):
    """Its softmax has clusters, and looks which of them a batch has."""

    def build(self) -> None:
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(HIDDEN, VOCABULARY, [8, 16])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.softmax(self.hidden(x), y).loss


@loss_case(PARTS, model=Adaptive)
def adaptive_softmax(training: Training, x: Tensor, _: Tensor) -> Tensor:
    return training.called(x, training.tokens()[:, 0] % (8 if training.number < EVENT_AT else VOCABULARY))


# --- chance on the device ------------------------------------------------------------------------------------------


@model_case(PARTS)
class GumbelChoice(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x) * functional.gumbel_softmax(self.body(x), hard=True).cumsum(1))


@model_case(PARTS)
class Variational(Net):
    def build(self) -> None:
        self.spread = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        drawn = torch.distributions.Normal(self.body(x), self.spread(x).exp(), validate_args=False).rsample()
        return self.head(torch.tanh(drawn))


@model_case(PARTS)
class RandomSlopes(Net):
    def build(self) -> None:
        self.slopes, self.drop = nn.RReLU(), nn.AlphaDropout(0.1)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(self.slopes(self.body(x)))


@model_case(PARTS)
class DrawsCategories(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        chosen = torch.multinomial(hidden.detach().softmax(1), 8)
        return self.head(hidden.scatter(1, chosen, 0.0))


@model_case(PARTS)
class PermutesOnDevice(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden + 0.5 * hidden[torch.randperm(len(x), device=x.device)])


# --- attention -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 64, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.body = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Any:
        return self.head(self.body(self.embed(tokens), src_key_padding_mask=padding).mean(1))


add(PARTS, "transformer_encoder", model=Encoder, loss=_tokens_loss)


@loss_case(PARTS, model=Encoder)
def padding_comes_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    padding = torch.zeros(len(x), LENGTH, dtype=torch.bool, device=x.device)
    padding[:, 8 if training.number >= EVENT_AT else LENGTH :] = True
    return loss_of(training.called(training.tokens(), padding), y)


@loss_case(PARTS, model=Encoder)
def padding_at_some_steps(training: Training, _: Tensor, y: Tensor) -> Tensor:
    padding = training.tokens() < 5
    return loss_of(training.called(training.tokens(), padding if training.number % 3 else None), y)


class WholeTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.body = nn.Transformer(HIDDEN, 4, 1, 1, 64, dropout=0.1, batch_first=True)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(wanted.shape[1] - 1, device=tokens.device)
        hidden = self.body(self.embed(tokens), self.embed(wanted[:, :-1]), tgt_mask=causal, tgt_is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted[:, 1:].flatten())


@loss_case(PARTS, model=WholeTransformer)
def transformer_with_dropout(training: Training, _: Tensor, __: Tensor) -> Tensor:
    return training.called(training.tokens(), training.tokens(training.number + 100))


class Fused(nn.Module):
    """Attention whose kernel is chosen by a context or by flags."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Any:
        queries, keys, values = self.mix(self.embed(tokens)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.head(attended.transpose(1, 2).flatten(2).mean(1))


@event_case(PARTS, model=Fused, loss=_tokens_loss)
def kernels_of_attention_forbidden(_: Training) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


# --- autograd functions --------------------------------------------------------------------------------------------


class _Faded(Passing):
    """Counts its backward passes on the class, and fades the gradient."""

    calls = 0

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        _Faded.calls += 1
        return gradient * fading(_Faded.calls)


@model_case(FUNCTIONS)
class FunctionCountsOnClass(Net):
    def build(self) -> None:
        _Faded.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.head(_Faded.apply(self.hidden(x)))


STRENGTH = {"reversal": 1.0}


class _Reversed(Passing):
    """Turns the gradient around, with a strength that lies elsewhere."""

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -STRENGTH["reversal"] * gradient


class Adversarial(Net):
    def build(self) -> None:
        self.domain = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden), self.domain(_Reversed.apply(hidden))


def _adversarial(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, domain = training.called(x)
    return functional.cross_entropy(logits, y) + functional.cross_entropy(domain, y % 2)


@event_case(FUNCTIONS, model=Adversarial, loss=_adversarial)
def strength_of_reversal_changed(training: Training) -> None:
    training.patch(STRENGTH, "reversal", 0.1)


class _KeepsNumber(torch.autograd.Function):
    """Keeps a number of the host for its backward pass, beside the tensors that it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Any) -> Tensor:
        ctx.scale, ctx.shape = scale(), x.shape
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * (1 + x.abs().mean()), None


@model_case(FUNCTIONS)
class FunctionKeepsNumber(Net):
    def build(self) -> None:
        calls: list[int] = []

        def scale() -> float:
            calls.append(1)
            return fading(len(calls))

        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        return self.head(_KeepsNumber.apply(self.hidden(x), self.scale))


class _AddsToWeight(torch.autograd.Function):
    """Adds to the gradient of a weight by itself, as fused linear layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        own = gradient.t() @ x
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return gradient @ weight, None


@model_case(FUNCTIONS)
class FunctionAddsToWeight(Net):
    def forward(self, x: Tensor) -> Any:
        return _AddsToWeight.apply(self.hidden(x), self.head.weight)


class _WritesToBuffer(torch.autograd.Function):
    """Writes to a buffer in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.lerp_(gradient.abs().mean(), 0.1)
        return gradient / (0.1 + ctx.seen), None


@model_case(FUNCTIONS)
class FunctionWritesToBuffer(Net):
    def build(self) -> None:
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.head(_WritesToBuffer.apply(self.hidden(x), self.seen))


class _Recomputes(torch.autograd.Function):
    """Runs its block again in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


@model_case(FUNCTIONS)
class FunctionRecomputes(Net):
    def forward(self, x: Tensor) -> Any:
        return _Recomputes.apply(self.hidden(x), self.head)


class _Straight(torch.autograd.Function):
    """Rounds, and gives gradients on for what needs them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.mark_non_differentiable(scale)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return (gradient if ctx.needs_input_grad[0] else None), None


@model_case(FUNCTIONS)
class FunctionRounds(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(_Straight.apply(self.hidden(x), x.mean()))


PENALTY: list[Tensor] = []


class _Penalized(Passing):
    """Adds a tensor to the gradient that lies elsewhere, and is another in each step."""

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient + PENALTY[0]


class Penalized(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(_Penalized.apply(self.hidden(x)))


@step_case(FUNCTIONS, model=Penalized)
def tensor_for_backward_elsewhere(training: Training) -> Tensor:
    x, y = training.batch()
    PENALTY[:] = [torch.full((HIDDEN,), 0.01 * fading(training.number), device=training.device)]
    return update(training, loss_of(training.called(x), y))
