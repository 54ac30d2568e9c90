"""`attention`: which kernels are preferred for scaled_dot_product_attention, in training and in a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated.recorded import RecordedEvaluator
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import amptune
from amptune.errors import FileFormatError
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model
from amptune.policy.file_io import parse_policy
from amptune.policy.knobs import attention
from amptune.policy.setting_effects import numerics_of, ordered_as
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.policy.yaml_text import parse
from amptune.report.explanation import explain
from amptune.search.gate.judgements import Judgements
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.space.knobs import points
from amptune.workload.workload import Workload

SPACE = """
schema: amptune.space/1
architecture: mine
compute_capability: []
extends: cpu
knobs: {attention: [cudnn, stock]}
try_first: [{autocast: bf16, attention: cudnn}, {autocast: bf16}]
"""
MATH, FLASH, EFFICIENT, CUDNN, OTHERS = range(5)
HEADS, TOKENS, WIDTH = 4, 128, 256


@pytest.fixture(autouse=True)
def _as_pytorch_comes() -> Iterator[None]:
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([FLASH, EFFICIENT, MATH, CUDNN, OTHERS])
    yield
    torch._C._set_sdp_priority_order(before)


class Attention(nn.Module):
    """Attention, causal by a mask: as libraries write it while they are compiled, and what no FlashAttention takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: torch.Tensor = self.outer(mixed.transpose(1, 2).flatten(2))
        return out


def workload(model: Any) -> Workload:
    return Workload(
        model=model,
        batch=lambda n: torch.randn(n, TOKENS, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=2,
    )


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is applied is the same for a model on a CPU, only that nothing there asks for the order."""
    monkeypatch.setattr(attention, "_is_on_gpu", lambda _: True)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize(
    ("preferred", "order"),
    [
        ((), [FLASH, EFFICIENT, MATH, CUDNN, OTHERS]),
        (("cudnn",), [CUDNN, FLASH, EFFICIENT, MATH, OTHERS]),
        (("math", "cudnn"), [MATH, CUDNN, FLASH, EFFICIENT, OTHERS]),
    ],
)
def test_what_is_preferred_comes_first_until_it_is_undone(preferred: Any, order: list[int]) -> None:
    with amptune.apply(Policy(attention=preferred), nn.Linear(2, 2)):
        assert torch._C._get_sdp_priority_order() == order
    assert torch._C._get_sdp_priority_order() == [FLASH, EFFICIENT, MATH, CUDNN, OTHERS]


def test_a_model_on_a_cpu_does_not_care() -> None:
    tuned = amptune.apply(Policy(attention=("cudnn",)), nn.Linear(2, 2))
    assert torch._C._get_sdp_priority_order() == [FLASH, EFFICIENT, MATH, CUDNN, OTHERS]
    assert [finding.code for finding in tuned.findings] == ["attention-without-effect"]
    tuned.undo()


@pytest.mark.slow
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_no_graph_of_another_order_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of this process nor one that torch.compile stored: it holds the kernels of its own order."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    preferred: Any
    for preferred, (missed, hit) in (((), (1, 0)), (("math",), (2, 0)), ((), (2, 1)), (("math",), (2, 2))):
        with amptune.apply(Policy(compile="default", attention=preferred), Attention()) as tuned:
            tuned.model(torch.ones(1, 8, WIDTH)).sum().backward()
        found = counters["aot_autograd"]
        assert (found["autograd_cache_miss"], found["autograd_cache_hit"]) == (missed, hit)


def test_a_file_has_an_order(tmp_path: Path) -> None:
    policy = Policy(attention=("cudnn", "flash"))
    amptune.save(policy, tmp_path / "policy.yaml")
    loaded = amptune.load(tmp_path / "policy.yaml")
    assert loaded.policy == policy
    assert str(loaded.policy) == "attention cudnn, flash"
    assert any(line.startswith("attention cudnn, flash: these kernels compute") for line in explain(loaded))
    amptune.save(STOCK, tmp_path / "stock.yaml")
    assert "attention" not in (tmp_path / "stock.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cudnn, fast]", "2:20: attention.1: 'fast' is not one of cudnn, flash, efficient, math"),
        ("[cudnn, cudnn]", "attention: a value stands there twice"),
        ("cudnn", "2:12: attention:"),
    ],
)
def test_an_order_that_means_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(FileFormatError, match=said):
        parse_policy(parse(f"schema: amptune.policy/1\nattention: {text}", "x.yaml"))


@pytest.mark.parametrize("attends", [True, False])
def test_a_space_of_ones_own_tries_it_where_the_model_attends(attends: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPACE)
    prepared = RecordedEvaluator("small").prepare(1.0)
    prepared = replace(prepared, subject=replace(prepared.subject, attends=attends))
    wanted = Wanted(baseline=STOCK, pins={}, space=tmp_path / "mine.yaml", compile=False)
    candidates = candidates_for(prepared, wanted)
    cudnn = Policy(autocast="bf16", attention=("cudnn",))
    assert candidates.allows(cudnn)
    assert candidates.allows(Policy(attention=("flash",))) is not attends
    assert (cudnn in map(candidates.policy_of, points(candidates.space))) is attends
    assert cudnn in candidates.first or not attends
    assert not any("attention" in point for point in candidates.space.try_first if not attends)
    pinned = candidates_for(prepared, Wanted(baseline=STOCK, pins={"attention": "flash"}, compile=False))
    assert all(pinned.policy_of(point).attention == ("flash",) for point in points(pinned.space))


def test_it_is_judged_with_its_precision_and_needs_no_judgement_in_fp32() -> None:
    judgements: Judgements[Any] = Judgements(STOCK)
    cudnn = Policy(autocast="bf16", attention=("cudnn",))
    assert judgements.is_exempt(Policy(attention=("cudnn",)))
    assert not judgements.is_exempt(cudnn)
    assert numerics_of(cudnn) == ordered_as(amp_recipe("bf16"), cudnn) == cudnn


class Torchs(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 64, batch_first=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "attends"),
    [(Attention, True), (Torchs, True), (lambda: nn.Linear(WIDTH, WIDTH), False)],
    ids=["own", "PyTorch's layer", "none"],
)
def test_a_step_tells_whether_the_model_attends(model: Any, attends: bool) -> None:
    assert inspect_model(Bench(workload(model), torch.device("cuda")), "").attends is attends


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": True}, {"compile": "default"}], ids=str)
def test_the_kernels_are_those_that_are_preferred(settings: Any) -> None:
    """Two orders in turn: neither CUDA graphs nor torch.compile keep the kernels of the other."""
    for _ in range(2):
        preferred: Any
        for preferred, name in ((("efficient",), "fmha"), (("cudnn",), "cudnn")):
            model = Attention().cuda()
            with amptune.apply(Policy(autocast="bf16", attention=preferred, **settings), model) as tuned:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                train = tuned.training_step(lambda model, batch: model(batch).square().mean(), optimizer)
                batch = torch.randn(2, TOKENS, WIDTH, device="cuda")
                for _ in range(4):
                    train(batch)
                with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                    train(batch)
                    torch.cuda.synchronize()
            kernels = {event.key.lower() for event in seen.key_averages()}
            assert any(name in kernel and ("sdpa" in kernel or "fmha" in kernel) for kernel in kernels), kernels
