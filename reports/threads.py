"""What threads cost beside a busy program: steps of small models with one thread and with all of this process's.

    python reports/threads.py > reports/busy/threads.txt        # a minute

In turn on the quiet machine and beside a process that never rests: the median of eight blocks of 0.4 s, in ms a step.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

BLOCKS, BLOCK_S, WARM_UP = 8, 0.4, 5
Case = tuple[nn.Module, torch.Tensor]


class Recurrent(nn.Module):
    """The last output of a recurrent network, classified."""

    def __init__(self, cells: nn.Module) -> None:
        super().__init__()
        self.cells, self.head = cells, nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.cells(x)[0][:, -1])
        return found


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(32 * 64, 10))


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(
        first, nn.Conv2d(16, 32, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


CASES: dict[str, Callable[[], Case]] = {
    "perceptron": lambda: (perceptron(), torch.randn(32, 256)),
    "LSTM": lambda: (Recurrent(nn.LSTM(64, 64, 2, batch_first=True)), torch.randn(8, 50, 64)),
    "GRU": lambda: (Recurrent(nn.GRU(64, 64, 2, batch_first=True)), torch.randn(32, 20, 64)),
    "transformer": lambda: (transformer(), torch.randn(4, 32, 64)),
    "convolutions": lambda: (convolutions(), torch.randn(8, 3, 16, 16)),
}


def step_of(case: Case) -> Callable[[], None]:
    model, x = case
    y, optimizer = torch.randint(10, (len(x),)), torch.optim.AdamW(model.parameters())

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def block_ms(step: Callable[[], None], threads: int) -> float:
    """Returns the mean time of a step in one block, with so many threads."""
    torch.set_num_threads(threads)
    for _ in range(WARM_UP):
        step()
    steps, began_s = 0, time.perf_counter()
    while time.perf_counter() < began_s + BLOCK_S:
        step()
        steps += 1
    return 1000 * (time.perf_counter() - began_s) / steps


def spin() -> None:
    while True:
        pass


def table(where: str, threads: int) -> None:
    for name, case in CASES.items():
        step = step_of(case())
        turns = [(block_ms(step, 1), block_ms(step, threads)) for _ in range(BLOCKS)]
        one, many = (statistics.median(times) for times in zip(*turns, strict=True))
        print(
            f"{where:>6} {name:<13} {one:8.2f} ms with 1 thread {many:8.2f} ms with {threads}: {many / one:.2f} times"
        )


def main() -> None:
    threads = torch.get_num_threads()
    table("quiet", threads)
    busy = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    busy.start()
    table("busy", threads)
    busy.kill()


if __name__ == "__main__":
    main()
