"""`float8_modules`: Linears that multiply in FP8, by torchao; on a CPU it is emulated."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from test_apply_and_undo import state_of
from torch import nn
from torch.nn import functional

import amptune
from amptune import Float8Rule, Fp32Rule, HalfRule, Policy
from amptune.errors import PolicyApplyError
from amptune.measure.bench.bench import Bench
from amptune.measure.modules import inspection
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.policy.setting_effects import graph_of, numerics_of, rounding_of
from amptune.runtime import float8
from amptune.search.gate.judgement import judged
from amptune.search.table.ablation import variants_of

WIDTH = 32
BF16 = Policy(autocast="bf16")
MLPS = replace(BF16, float8_modules=(Float8Rule(path="layers.*.mlp.*"),))


def block(width: int) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(width), mlp=mlp))


def built() -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(block(WIDTH), block(WIDTH))
    return nn.Sequential(OrderedDict(first=nn.Linear(10, WIDTH), layers=layers, head=nn.Linear(WIDTH, 4 * WIDTH)))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torchao.float8", reason="FP8 is torchao's: pip install 'amptune[float8]'")
    monkeypatch.setattr(float8, "EMULATE", True)
    yield
    torch.compiler.reset()


def gradients(policy: Policy, model: nn.Module, rows: int = 48) -> list[torch.Tensor]:
    """The output, and all gradients, of one step."""
    x = torch.randn(rows, 10, generator=torch.Generator().manual_seed(1))
    with amptune.apply(policy, model, guard=False) as tuned:
        with tuned.autocast():
            out = tuned.model(x)
        out.float().square().mean().backward()
    found = [out.detach().float(), *(one.grad for one in model.parameters() if one.grad is not None)]
    model.zero_grad()
    return found


def in_float8(model: nn.Module) -> list[str]:
    return [path for path, one in model.named_modules() if isinstance(one, nn.Linear) and type(one) is not nn.Linear]


def off(some: torch.Tensor, others: torch.Tensor) -> float:
    return float((some - others).norm() / others.norm())


def test_it_rounds_otherwise_and_makes_another_graph() -> None:
    assert rounding_of(MLPS) == numerics_of(MLPS) == MLPS
    assert graph_of(MLPS) != graph_of(Policy())
    assert [one.policy for one in variants_of(MLPS)] == [Policy(), BF16]


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        (None, r"float8_modules: FP8 needs a GPU of compute capability 8\.9 or more, and"),
        ((8, 0), r"capability 8\.9 or more, and this one has 8\.0"),
        ((9, 0), r"FP8 needs torchao \(.*pip install 'amptune\[float8\]'"),
    ],
    ids=["no GPU", "before Ada", "no torchao"],
)
def test_it_is_refused_without_a_gpu_that_has_it_or_torchao(
    capability: tuple[int, int] | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "EMULATE", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "torchao", None)
    model = built()
    with pytest.raises(PolicyApplyError, match=why):
        amptune.apply(MLPS, model)
    assert in_float8(model) == []


def test_rules_without_a_linear_and_sizes_that_are_no_multiples_of_16_are_refused_all_at_once() -> None:
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 7))
    for rules, expected in (
        ((Float8Rule(path="1"), Float8Rule(type="GELU")), r"rules of float8_modules name no Linear: 1, type GELU"),
        ((Float8Rule(path="*"),), r"FP8:\n  0 is 10 wide and gives 32, and FP8 needs multiples of 16\n  2 is 32 wide"),
    ):
        with pytest.raises(PolicyApplyError, match=expected):
            amptune.apply(replace(BF16, float8_modules=rules), model)
    assert in_float8(model) == []


def test_undone_all_is_as_it_was() -> None:
    model = built()
    plain = gradients(BF16, model)
    before = state_of(model)
    tuned = amptune.apply(MLPS, model)
    assert in_float8(model) == [f"layers.{n}.mlp.{m}" for n in (0, 1) for m in (0, 2)]
    assert list(model.state_dict()) == list(built().state_dict())
    tuned.undo()
    assert state_of(model) == before
    assert all(map(torch.equal, gradients(BF16, model), plain))


@pytest.mark.parametrize("rows", [48, 7])
def test_values_are_rounded_to_fp8_and_gradients_stay_near(rows: int) -> None:
    plain, fp8 = (gradients(policy, built(), rows) for policy in (BF16, MLPS))
    errors = [off(mine, own) for mine, own in zip(fp8, plain, strict=True)]
    assert 0.002 < errors[0] < 0.1
    assert 0.002 < max(errors[1:]) < 0.3
    assert [one.dtype for one in fp8] == [torch.float32] * len(fp8)


def test_modules_in_fp32_stay_so_and_of_rules_in_half_fp8_wins() -> None:
    rules = (Float8Rule(path="layers"), Float8Rule(type="Linear"))
    model = built().layers
    own = replace(BF16, float8_modules=rules[1:], fp32_modules=(Fp32Rule(path="0"),))
    own = replace(own, half_modules=(HalfRule(path="1.mlp.0"), HalfRule(path="1.norm")))
    with amptune.apply(own, model):
        assert in_float8(model) == ["1.mlp.0", "1.mlp.2"]
    with amptune.apply(replace(BF16, float8_modules=rules[:1]), whole := built()):
        assert in_float8(whole) == [f"layers.{n}.mlp.{m}" for n in (0, 1) for m in (0, 2)]


def test_without_a_compiler_a_finding_says_what_is_missing() -> None:
    codes = [
        [one.code for one in amptune.apply(policy, built()).findings]
        for policy in (MLPS, replace(MLPS, compile="default"))
    ]
    assert codes == [["float8-not-compiled"], []]


def wide_linears_of(model: nn.Module, rows: int = WIDTH) -> tuple[str, ...]:
    return inspect_model(Bench(workload_of(model, (10,), batch_size=rows), CPU), "").wide_linears


def test_wide_linears_are_those_that_are_called_but_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LEAST_SIDE", WIDTH)
    monkeypatch.setattr(inspection, "LEAST_LONG_SIDE", 4 * WIDTH)
    model = built()
    model.layers[0].norm.unused = nn.Linear(WIDTH, 4 * WIDTH)
    assert wide_linears_of(model) == tuple(f"layers.{n}.mlp.{m}" for n in (0, 1) for m in (0, 2))
    assert wide_linears_of(built(), rows=WIDTH - 1) == ()
    monkeypatch.setattr(float8, "EMULATE", False)
    if not torch.cuda.is_available():
        assert wide_linears_of(built()) == ()


@pytest.mark.parametrize("outlier", [1.0, 1e8])
def test_the_gate_passes_healthy_fp8_and_not_that_of_values_that_vanish_beside_a_large_one(outlier: float) -> None:
    """A tensor has one scale: beside 1e8, a value of 1 is 0 in FP8. In bf16 each value has its own exponent."""

    def batch(n: int) -> torch.Tensor:
        x = torch.randn(n, WIDTH)
        x[:, 0] *= outlier
        return x

    def model() -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(linear.weight[:, 0].detach())
        hook: Any = linear.weight.register_hook
        hook(lambda gradient: gradient * (torch.arange(WIDTH) > 0))
        return nn.Sequential(linear, nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def loss(net: nn.Module, x: torch.Tensor) -> Any:
        return functional.mse_loss(net(x).float(), x.clamp(-1, 1).roll(1))

    bench = Bench(workload_of(model, batch=batch, loss=loss, batch_size=64), CPU)
    reference = make_reference(bench, Policy(), 2.0)
    fp8 = replace(BF16, float8_modules=(Float8Rule(path="0"),))
    passes = [judged(policy, judge(bench, policy, reference)).passes for policy in (BF16, fp8)]
    assert passes == [True, outlier == 1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compiled_fp8_trains_wide_layers_faster_and_near_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATE", False)
    if (why := float8.no_float8_because(torch.device("cuda"))) is not None:
        pytest.skip(why)
    torch.manual_seed(0)
    model = nn.Sequential(*(block(4096) for _ in range(2))).cuda()
    x = torch.randn(8192, 4096, device="cuda")
    ms, found = {}, {}
    for policy in (BF16, replace(BF16, float8_modules=(Float8Rule(path="**.mlp"),))):
        torch.compiler.reset()  # in training, one policy is all that a process compiles
        with amptune.apply(replace(policy, compile="default"), model, guard=False) as tuned:

            def step() -> None:
                with tuned.autocast():
                    loss: Any = functional.mse_loss(tuned.model(x).float(), x)
                loss.backward()

            step()
            found[policy] = [one.grad.clone() for one in model.parameters() if one.grad is not None]
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(20):
                step()
            torch.cuda.synchronize()
            ms[policy] = 1000 * (time.perf_counter() - began_s) / 20
            model.zero_grad()
    (bf16, fp8) = ms
    assert max(off(mine, own) for mine, own in zip(found[fp8], found[bf16], strict=True)) < 0.3
    assert ms[fp8] < ms[bf16]
    assert in_float8(model) == []
