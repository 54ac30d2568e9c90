"""Eight models whose steps differ from one to the next, or that compilers and recordings find hard, as targets.

    amptune tune reports/unruly_models.py:early_exit --budget 120s

They were chosen before anything was measured, one for each kind of trouble. They draw from the global generators of
PyTorch, NumPy and Python, as such code does. Weights are random and data is synthetic. `tiny=True` gives the same kind
of model in a size for tests. transformers builds two of them, and is imported when a model is built.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from foreign_models import own_loss  # beside this program
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from unruly_modules import (
    IMAGE_CLASSES,
    TOPICS,
    Decoder,
    Denoiser,
    MaskedImages,
    Ponderer,
    classifier,
)

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import adamw, cross_entropy, in_memory, labelled_images, sgd

if TYPE_CHECKING:
    from amptune.runtime.tuned import Tuned

# Of the first model's symbols, the last stands for "no letter" in CTC.
_LETTERS, _SAMPLES_PER_LETTER = 32, 4000
_PONDER_COST = 0.01
_MOST_GRADIENT = 1.0
_BATCHES_OF_A_SIDE = 16


# --- layers dropped at random --------------------------------------------------------------------------------------


def layers_dropped(*, tiny: bool = False) -> Workload:
    """A speech recognizer that skips layers at random, masked by NumPy (Baevski et al., 2020, arXiv:2006.11477)."""
    seconds_of_sound = 1 if tiny else 5

    def model() -> nn.Module:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        width = 32 if tiny else 512
        config = Wav2Vec2Config(
            vocab_size=_LETTERS,
            hidden_size=width,
            num_hidden_layers=2 if tiny else 12,
            num_attention_heads=width // 16 if tiny else width // 64,
            intermediate_size=4 * width,
            conv_dim=(width,) * 7,
            num_conv_pos_embedding_groups=4 if tiny else 16,
            layerdrop=0.1,
            mask_time_prob=0.05,
            ctc_loss_reduction="mean",
            ctc_zero_infinity=True,
            pad_token_id=_LETTERS - 1,
        )
        built: nn.Module = Wav2Vec2ForCTC(config)
        return built

    def spoken(n: int) -> dict[str, Tensor]:
        samples = 16000 * seconds_of_sound
        letters = torch.randint(_LETTERS - 1, (n, samples // _SAMPLES_PER_LETTER))
        return {"input_values": torch.randn(n, samples), "labels": letters}

    return Workload(
        name="layers_dropped",
        model=model,
        batch=spoken,
        loader=partial(in_memory, batch=spoken),
        loss=own_loss,
        optimizer=adamw,
        batch_size=2 if tiny else 8,
    )


# --- masks drawn on the host ---------------------------------------------------------------------------------------


def host_masks(*, tiny: bool = False) -> Workload:
    """A transformer restores patches, masked by NumPy in the forward pass (Xie et al., 2021, arXiv:2111.09886)."""
    side = 64 if tiny else 224

    def batch(n: int) -> Tensor:
        return torch.randn(n, 3, side, side)

    return Workload(
        name="host_masks",
        model=lambda: MaskedImages(side=side, width=64 if tiny else 384, layers=2 if tiny else 12),
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=lambda model, images: model(images),
        optimizer=adamw,
        batch_size=2 if tiny else 64,
    )


# --- batches of changing length ------------------------------------------------------------------------------------


def changing_lengths(*, tiny: bool = False) -> Workload:
    """A text classifier whose batches are padded to their longest text (Devlin et al., 2018, arXiv:1810.04805)."""
    longest = 32 if tiny else 320
    vocabulary, width = (100, 32) if tiny else (30522, 512)

    def model() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=2 if tiny else 8,
            num_attention_heads=width // 16 if tiny else width // 64,
            intermediate_size=4 * width,
            num_labels=TOPICS,
        )
        built: nn.Module = BertForSequenceClassification(config)
        return built

    def text() -> tuple[Tensor, int]:
        length = min(longest, max(4, int(random.lognormvariate(math.log(longest / 3), 0.5))))
        return torch.randint(1, vocabulary, (length,)), random.randrange(TOPICS)  # noqa: S311  # no secret

    def loader(batch_size: int) -> DataLoader[Any]:
        texts: Any = [text() for _ in range(64 * batch_size)]
        return DataLoader(texts, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=_padded)

    return Workload(
        name="changing_lengths",
        model=model,
        batch=lambda n: _padded([text() for _ in range(n)]),
        loader=loader,
        loss=own_loss,
        optimizer=adamw,
        batch_size=4 if tiny else 32,
    )


def _padded(texts: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Returns token ids of shape (texts, longest), 0 behind the end of each text, with their mask and labels."""
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in texts], batch_first=True)
    labels = torch.tensor([label for _, label in texts])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


# --- experts chosen by data ----------------------------------------------------------------------------------------


def experts_by_data(*, tiny: bool = False) -> Workload:
    """A decoder in which each token chooses two of eight experts (Jiang et al., 2024, arXiv:2401.04088)."""
    return _language("experts_by_data", layers=2 if tiny else 6, experts=True, tiny=tiny)


def _language(name: str, *, tiny: bool, **kind: Any) -> Workload:
    vocabulary, width, length = (100, 32, 16) if tiny else (16000, 512, 256)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (n, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(
        name=name,
        model=lambda: Decoder(vocabulary, width, **kind),
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=lambda model, batch: model(*batch),
        optimizer=adamw,
        batch_size=2 if tiny else 16,
    )


# --- early exit ----------------------------------------------------------------------------------------------------


def early_exit(*, tiny: bool = False) -> Workload:
    """A classifier in which each text leaves after as many layers as it wants (Graves, 2016, arXiv:1603.08983)."""
    vocabulary, width, length = (100, 32, 16) if tiny else (16000, 512, 128)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (n, length)), torch.randint(TOPICS, (n,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        answers, layers = model(batch[0])
        wrong: Tensor = functional.cross_entropy(answers, batch[1]) + _PONDER_COST * layers
        return wrong

    return Workload(
        name="early_exit",
        model=lambda: Ponderer(vocabulary, width, layers=3 if tiny else 10),
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=loss,
        optimizer=adamw,
        batch_size=4 if tiny else 64,
    )


# --- a loss that is read every step --------------------------------------------------------------------------------


def loss_read(*, tiny: bool = False) -> Workload:
    """A denoiser whose step reads the loss, and takes no spikes (Ho et al., 2020, arXiv:2006.11239)."""
    side = 16 if tiny else 64

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, side, side), torch.rand(n)

    return Workload(
        name="loss_read",
        model=lambda: Denoiser(width=16 if tiny else 128),
        batch=batch,
        loader=partial(in_memory, batch=batch),
        step=_WatchedStep(),
        optimizer=adamw,
        batch_size=2 if tiny else 32,
    )


class _WatchedStep:
    """A step that keeps a running mean of the losses on the host."""

    def __init__(self) -> None:
        self._usual: float | None = None

    def __call__(self, tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        images, times = tuned.batch(batch)
        noise = torch.randn_like(images)
        share = times.view(-1, 1, 1, 1)
        optimizer.zero_grad()
        with tuned.autocast():
            restored = model(images * (1 - share).sqrt() + noise * share.sqrt(), times)
            loss = functional.mse_loss(restored.float(), noise)
        if self._is_usual(loss.item()):
            tuned.scaler.scale(loss).backward()  # torch has not typed it
            tuned.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), _MOST_GRADIENT)
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
        return loss

    def _is_usual(self, loss: float) -> bool:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        before = loss if self._usual is None else self._usual
        self._usual = 0.99 * before + 0.01 * loss
        return loss < 10 * before


# --- shapes that compile anew --------------------------------------------------------------------------------------


def growing_images(*, tiny: bool = False) -> Workload:
    """A classifier whose images grow during each pass over the data (Tan and Le, 2021, arXiv:2104.00298)."""
    sides = (16, 24) if tiny else (96, 128, 160, 192, 224)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return labelled_images(n, side=random.choice(sides), classes=IMAGE_CLASSES)  # noqa: S311  # no secret

    return Workload(
        name="growing_images",
        model=lambda: classifier(width=8 if tiny else 64, blocks=1 if tiny else 3),
        batch=batch,
        loader=partial(_Growing, sides),
        loss=cross_entropy,
        optimizer=sgd,
        batch_size=2 if tiny else 96,
    )


class _Growing:
    """Batches of images of one side after another, as often as they are asked for."""

    def __init__(self, sides: Sequence[int], batch_size: int) -> None:
        images = [partial(labelled_images, side=side, classes=IMAGE_CLASSES) for side in sides]
        self._of_sides = [in_memory(batch_size, batch=batch) for batch in images]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batches in self._of_sides:
            yield from islice(batches, _BATCHES_OF_A_SIDE)


# --- a custom autograd function ------------------------------------------------------------------------------------


def custom_autograd(*, tiny: bool = False) -> Workload:
    """A decoder whose loss holds logits of some rows at a time, with its gradient made in the forward pass.

    As in Liger (Hsu et al., 2024, arXiv:2410.10989).
    """
    return _language("custom_autograd", layers=2 if tiny else 8, rows=True, tiny=tiny)
