"""The models of speech in the published tables, as targets.

    amptune predict reports/published_speech.py:jasper --gpu all

What is left out of a model or simplified is said at it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from published_models import as_workload, drawn
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload


class Tacotron2(nn.Module):
    """Tacotron 2 (Shen et al., 2017, arXiv:1712.05884), for 15 characters and 55 frames, a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(148, 512)
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Conv1d(512, 512, 5, padding=2), nn.BatchNorm1d(512), nn.ReLU(),
                                                     nn.Dropout(0.5)) for _ in range(3)))  # fmt: skip
        self.memory = nn.LSTM(512, 256, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256), nn.ReLU())
        self.attention_rnn, self.decoder_rnn = nn.LSTMCell(256 + 512, 1024), nn.LSTMCell(1024 + 512, 1024)
        self.query, self.key, self.score = nn.Linear(1024, 128), nn.Linear(512, 128), nn.Linear(128, 1)
        self.place = nn.Conv1d(2, 32, 31, padding=15)
        self.located = nn.Linear(32, 128)
        self.head, self.gate = nn.Linear(1024 + 512, 80), nn.Linear(1024 + 512, 1)
        widths = (80, 512, 512, 512, 512, 80)
        layers = [
            (nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b), nn.Tanh(), nn.Dropout(0.5)) for a, b in pairwise(widths)
        ]
        self.postnet = nn.Sequential(*(module for layer in layers for module in layer))

    def forward(self, letters: Tensor, frames: Tensor) -> Tensor:
        memory = self.memory(self.encoder(self.letters(letters).transpose(1, 2)).transpose(1, 2))[0]
        keys, given = self.key(memory), self.prenet(frames)
        n = len(letters)
        context, shares = memory.new_zeros(n, 512), memory.new_zeros(n, 2, letters.shape[1])
        first = second = (memory.new_zeros(n, 1024), memory.new_zeros(n, 1024))
        seen = []
        for frame in given.unbind(1):
            first = self.attention_rnn(torch.cat([frame, context], 1), first)
            hidden = functional.dropout(first[0], 0.1)
            where = self.located(self.place(shares).transpose(1, 2))
            scores = self.score(torch.tanh(self.query(hidden).unsqueeze(1) + keys + where)).squeeze(2)
            share = functional.softmax(scores, 1)
            context = torch.bmm(share.unsqueeze(1).to(memory.dtype), memory).squeeze(1)
            shares = torch.stack([share, shares[:, 1] + share], 1)
            second = self.decoder_rnn(torch.cat([hidden, context], 1), second)
            seen.append(torch.cat([functional.dropout(second[0], 0.1), context], 1))
        states = torch.stack(seen, 1)
        mel = self.head(states)
        output: Tensor = mel + self.postnet(mel.transpose(1, 2)).transpose(1, 2) + self.gate(states)
        return output


def tacotron2() -> Workload:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(148, (n, 15)), torch.randn(n, 55, 80)

    return as_workload("tacotron2", Tacotron2, batch, batch_size=48)


class WaveNetBlock(nn.Module):
    """WaveGlow's affine coupling: eight dilated convolutions of 512 channels over half of the channels."""

    def __init__(self, half: int, width: int = 512) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(half, width, 1), nn.Conv1d(width, 2 * half, 1)
        self.condition = nn.Conv1d(640, 2 * width * 8, 1)
        self.inner = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2**i, padding=2**i) for i in range(8))
        self.outer = nn.ModuleList(nn.Conv1d(width, 2 * width if i < 7 else width, 1) for i in range(8))

    def forward(self, sound: Tensor, spectrum: Tensor) -> Tensor:
        x, conditions = self.start(sound), self.condition(spectrum).chunk(8, 1)
        output = torch.zeros_like(x)
        for inner, outer, condition in zip(self.inner, self.outer, conditions, strict=True):
            tanh, sigmoid = (inner(x) + condition).chunk(2, 1)
            y = outer(torch.tanh(tanh) * torch.sigmoid(sigmoid))
            x = x + y[:, :512]
            output = output + y[:, -512:]
        ended: Tensor = self.end(output)
        return ended


class WaveGlow(nn.Module):
    """WaveGlow (Prenger et al., 2018, arXiv:1811.00002): 12 flows over 4,000 samples in groups of 8."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [8 - 2 * (i // 4) for i in range(12)]
        self.mixes = nn.ModuleList(nn.Conv1d(n, n, 1, bias=False) for n in sizes)
        self.flows = nn.ModuleList(WaveNetBlock(n // 2) for n in sizes)

    def forward(self, sound: Tensor, spectrum: Tensor) -> Tensor:
        outputs = []
        for i, (mix, flow) in enumerate(zip(self.mixes, self.flows, strict=True)):
            if i % 4 == 0 and i:
                outputs.append(sound[:, :2])
                sound = sound[:, 2:]
            first, second = mix(sound).chunk(2, 1)
            shift, scale = flow(first, spectrum).chunk(2, 1)
            sound = torch.cat([first, torch.exp(scale) * second + shift], 1)
        return torch.cat([*outputs, sound], 1)


def waveglow() -> Workload:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 8, 500), torch.randn(n, 640, 500)

    return as_workload("waveglow", WaveGlow, batch, batch_size=8)


class SpeechBlock(nn.Module):
    """A block of 1D convolutions: Jasper's (Li et al., 2019, arXiv:1904.03288), or separable as in QuartzNet."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, repeats: int, *, separable: bool, stride: int = 1
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(repeats):
            a = inputs if i == 0 else outputs
            if separable:
                layers += [nn.Conv1d(a, a, kernel, stride, kernel // 2, groups=a, bias=False)]
                layers += [nn.Conv1d(a, outputs, 1, bias=False)]
            else:
                layers += [nn.Conv1d(a, outputs, kernel, stride, kernel // 2, bias=False)]
            layers += [nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.2)]
        self.body = nn.Sequential(*layers)
        residual = repeats > 1
        self.shortcut = (
            nn.Sequential(nn.Conv1d(inputs, outputs, 1, bias=False), nn.BatchNorm1d(outputs)) if residual else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y if self.shortcut is None else y + self.shortcut(x)


def _speech(rows: list[tuple[int, int, int]], *, separable: bool) -> nn.Sequential:
    blocks: list[nn.Module] = [SpeechBlock(64, 256, 11, 1, separable=separable, stride=2)]
    inputs = 256
    for outputs, kernel, repeats in rows:
        blocks.append(SpeechBlock(inputs, outputs, kernel, repeats, separable=separable and kernel > 1))
        inputs = outputs
    return nn.Sequential(*blocks, nn.Conv1d(inputs, 29, 1), nn.LogSoftmax(1))


def jasper() -> Workload:
    """Jasper 10x5 without its dense connections, 12 s of sound."""
    rows = [(w, k, 5) for w, k in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)) for _ in range(2)]
    model = partial(_speech, [*rows, (896, 29, 1), (1024, 1, 1)], separable=False)
    return as_workload("jasper", model, drawn(64, 1200), batch_size=32)


def quartznet() -> Workload:
    """QuartzNet 15x5 (Kriman et al., 2019, arXiv:1910.10261), 12 s of sound."""
    rows = [(w, k, 5) for w, k in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)) for _ in range(3)]
    model = partial(_speech, [*rows, (512, 87, 1), (1024, 1, 1)], separable=True)
    return as_workload("quartznet", model, drawn(64, 1200), batch_size=48)
