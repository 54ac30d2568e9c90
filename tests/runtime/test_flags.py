from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from amptune.changes.flags import set_fp32_math
from amptune.policy.settings import Fp32Math

SETTINGS = [
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
]
WANTED: dict[Fp32Math, tuple[str, str]] = {
    "stock": ("ieee", "tf32"),
    "ieee": ("ieee", "ieee"),
    "tf32": ("tf32", "tf32"),
}


@pytest.fixture(autouse=True)
def _flags_as_pytorch_has_them() -> Iterator[None]:
    yield
    for backend, operation in SETTINGS:
        torch._C._set_fp32_precision_setter(backend, operation, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    for backend in ("cuda", "mkldnn"):  # which the older switch has set
        torch._C._set_fp32_precision_setter(backend, "matmul", "none")


def readings() -> list[object]:
    """All a user can read of FP32 math; an error is a reading too."""
    values: list[object] = [torch._C._get_fp32_precision_getter(*setting) for setting in SETTINGS]
    for older in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                values.append(older())
            except RuntimeError:
                values.append("contradiction")
    return values


def readings_under_other_parents() -> list[list[object]]:
    """What a user would read after setting all backends at once: shows what follows a parent."""
    general = torch._C._get_fp32_precision_getter("generic", "all")
    values = []
    for precision in ("ieee", "tf32"):
        torch._C._set_fp32_precision_setter("generic", "all", precision)
        values.append(readings())
    torch._C._set_fp32_precision_setter("generic", "all", general)
    return values


def assert_effective(math: Fp32Math) -> None:
    matmul, cudnn = WANTED[math]
    backends: Any = torch.backends  # whose stubs know half of it
    assert backends.cuda.matmul.fp32_precision in ({matmul, "none"} if matmul == "ieee" else {matmul})
    assert backends.cudnn.conv.fp32_precision == cudnn
    assert backends.cudnn.rnn.fp32_precision == cudnn
    assert "contradiction" not in readings()


def test_stock_touches_nothing_in_a_fresh_process_and_no_setting_says_a_word_of_deprecated_switches() -> None:
    before = readings_under_other_parents()
    with warnings.catch_warnings(action="error"):
        set_fp32_math("stock")
        assert readings_under_other_parents() == before
        set_fp32_math("tf32")()


def older_steps() -> Iterator[Callable[[], object]]:
    for precision in ("highest", "high", "medium"):
        yield partial(torch.set_float32_matmul_precision, precision)
    for allowed in (True, False):
        yield partial(setattr, torch.backends.cudnn, "allow_tf32", allowed)
        yield partial(setattr, torch.backends.cuda.matmul, "allow_tf32", allowed)


def newer_steps() -> Iterator[Callable[[], object]]:
    for (backend, operation), precision in product(SETTINGS[:7], ("none", "ieee", "tf32", "bf16")):
        if precision != "bf16" or backend != "cuda":
            yield partial(torch._C._set_fp32_precision_setter, backend, operation, precision)


@pytest.mark.filterwarnings("ignore:Please use the new API")  # the older switches, in some versions
def test_whatever_was_set_before_fp32_math_becomes_effective_and_is_put_back_exactly() -> None:
    draw = random.Random(0)
    torch.backends.cudnn.allow_tf32 = True  # PyTorch's built-in default can be overwritten but not written
    steps = [*older_steps(), *newer_steps()]
    for _ in range(1500):
        for step in draw.choices(steps, k=2):
            step()
        math = draw.choice(list(WANTED))
        before = readings(), readings_under_other_parents()
        undo = set_fp32_math(math)
        assert_effective(math)
        undo()
        assert (readings(), readings_under_other_parents()) == before
