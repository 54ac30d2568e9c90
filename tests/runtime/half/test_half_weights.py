"""Training with weights in half, as Apex's O2 and O3 did, held against the same written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.half import training
from amptune.runtime.tuned import Tuned

O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=LossScale(max=2.0**24))
O3 = Policy(weights="half")

Optimize = Callable[[Any], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 3),
    )


def batches(count: int = 20) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(tuned: Tuned, optimizer: torch.optim.Optimizer, data: Sequence[Batch]) -> list[float]:
    """The losses."""
    losses = []
    for x, y in data:
        with tuned.autocast():
            loss = loss_of(tuned.model, (tuned.batch(x), y))
        tuned.scaler.scale(loss).backward()
        tuned.step(optimizer, clip=1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand(model: nn.Module, optimize: Optimize, data: Sequence[Batch], scale: float) -> tuple[list[float], int]:
    """The same with master weights written out, or without any if the model is in half; (losses, steps skipped)."""
    has_masters = next(model.parameters()).dtype is torch.float32
    masters: list[Any] = [p.detach().clone() if has_masters else p for p in model.parameters()]
    for module in model.modules() if has_masters else ():
        if not isinstance(module, nn.BatchNorm2d) and not any(module.children()):
            module.half()
    optimizer, losses, skipped = optimize(masters), [], 0
    for x, y in data:
        loss: Any = nn.functional.cross_entropy(model(x.half()).float(), y)
        (loss * scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True) if has_masters else ():
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / scale, None
        finite = all(bool(master.grad.isfinite().all()) for master in masters)
        nn.utils.clip_grad_norm_(masters, 1.0)
        if finite:
            optimizer.step()
        scale, skipped = (scale, skipped) if finite else (scale / 2, skipped + 1)
        optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses, skipped


def loss_of(model: nn.Module, batch: Batch) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.fixture
def applied() -> Iterator[tuple[nn.Sequential, Tuned]]:
    model = net()
    with apply(O2, model) as tuned:
        yield model, tuned


OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("optimize", "init"),
    [
        *[(partial(getattr(torch.optim, name), lr=1e-2), 1024.0) for name in OPTIMIZERS],
        *[(optimize, init) for optimize in (adamw, momentum) for init in (1024.0, 2.0**30)],
    ],
)
def test_o2_trains_as_master_weights_written_by_hand_do(optimize: Optimize, init: float) -> None:
    """With a state in FP32, whichever of PyTorch's optimizers it is."""
    model, data = net(), batches()
    expected, skipped = by_hand(net(), optimize, data, init)
    with apply(replace(O2, loss_scale=LossScale(init=init)), model) as tuned:
        optimizer = tuned.optimizer(optimize(model.parameters()))
        losses = train(tuned, optimizer, data)
        assert tuned.scaler.get_scale() == init / 2**skipped
        dtypes = {v.dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)}
        assert dtypes <= {torch.float32}
    assert losses == expected
    assert (skipped > 0) == (init > 1024)


@pytest.mark.parametrize("optimize", [partial(torch.optim.AdamW, lr=1e-2, eps=1e-4), momentum])
def test_o3_trains_as_a_model_in_half_does(optimize: Optimize) -> None:
    model, twin, data = net(), net().half(), batches()
    expected, _ = by_hand(twin, optimize, data, 1.0)
    with apply(O3, model) as tuned:
        assert train(tuned, tuned.optimizer(optimize(model.parameters())), data) == expected
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_model_takes_and_gives_fp32_and_sums_gradients_in_fp32(applied: tuple[nn.Sequential, Tuned]) -> None:
    model, tuned = applied
    ((x, _),) = batches(1)
    assert model(x).dtype is model(x.half()).dtype is torch.float32
    assert torch.equal(model(x), model(x.half()))
    one_by_one = []
    for batch in batches(2):
        model.zero_grad()
        loss_of(tuned.model, batch).backward()
        one_by_one.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    loss_of(tuned.model, batches(1)[0]).backward()
    for parameter, *parts in zip(model.parameters(), *one_by_one, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert torch.equal(parameter.grad, parts[1] + parts[0])


def test_modules_that_stay_in_fp32_give_half_to_those_behind_them() -> None:
    model, seen = net(), list[Any]()
    with apply(replace(O2, fp32_modules=(Fp32Rule(path="4"), Fp32Rule(type="LayerNorm"))), model) as tuned:
        assert {p.dtype for layer in (4, 5) for p in model[layer].parameters()} == {torch.float32}
        for layer in (4, 5, 6):
            model[layer].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
        loss_of(tuned.model, batches(1)[0])
        assert seen == [(torch.float16, torch.float16)] * 3


def test_a_closure_runs_with_the_models_own_parameters() -> None:
    model = net()
    expected, _ = by_hand(net(), adamw, batches(1) * 6, 1.0)
    with apply(O2, model, guard=False) as tuned:  # no scaler: it takes no closure
        optimizer = tuned.optimizer(adamw(model.parameters()))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        assert [optimizer.step(closure).item() for _ in range(6)] == expected  # type: ignore[attr-defined]


def test_a_group_that_is_added_later_gets_masters_too() -> None:
    model = net()
    model[4].requires_grad_(False)
    with apply(O2, model) as tuned:
        optimizer = tuned.optimizer(adamw([p for p in model.parameters() if p.requires_grad]))
        train(tuned, optimizer, batches(3))
        model[4].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 1e-7})
        before = state(model)
        train(tuned, optimizer, batches(3))
        assert not torch.equal(model.state_dict()["4.weight"], before["4.weight"])
        assert optimizer.state[model.get_parameter("4.weight")]["exp_avg"].dtype is torch.float32


def test_what_is_written_to_weights_and_to_a_state_dict_counts(applied: tuple[nn.Sequential, Tuned]) -> None:
    """As critics clip their weights, and averages of weights are kept in a copy of the model, by its state_dict()."""
    model, tuned = applied
    optimizer = tuned.optimizer(momentum(model.parameters()))
    average, expected = copy.deepcopy(model), state(model)
    for batch in batches(20):
        train(tuned, optimizer, [batch])
        for values in (average.state_dict(), expected):
            for name, now in state(model).items():
                if now.is_floating_point():
                    values[name].lerp_(now, 0.01)
    assert all(torch.equal(one, expected[name]) for name, one in state(average).items() if one.is_floating_point())
    assert rounded(average)
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)
    train(tuned, optimizer, batches(1))
    assert all(tensor.abs().max() <= 0.01001 for name, tensor in model.state_dict().items() if "weight" in name)


class Failing(torch.optim.SGD):
    """Raises in the middle of a step: the first parameter is updated, the others are not."""

    @torch.no_grad()
    def step(self, _: Any = None) -> Any:
        self.param_groups[0]["params"][0].add_(1.0)
        raise ZeroDivisionError


def rounded(model: nn.Module) -> bool:
    """True if the weights are the masters, rounded."""
    masters = model.state_dict()
    return all(torch.equal(p, masters[name].to(p.dtype)) for name, p in model.named_parameters())


STATIC = replace(O2, loss_scale=LossScale(init=1, static=True))


@pytest.mark.parametrize("policy", [O2, STATIC], ids=["scaler", "bare"])
def test_a_step_that_raises_half_way_leaves_weights_that_are_their_masters_rounded(policy: Policy) -> None:
    model = net()
    with apply(policy, model) as tuned:
        optimizer = tuned.optimizer(Failing(model.parameters()))
        first = next(model.parameters())
        before = first.detach().clone()
        with pytest.raises(ZeroDivisionError):
            train(tuned, optimizer, batches(1))
        assert (first - before).abs().max() > 0.9
        assert rounded(model)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_without_masters_a_checkpoint_has_the_rounded_weights_in_fp32() -> None:
    model, before = net(), state(net())
    with apply(O3, model):
        saved = state(model)
        assert same(saved, {n: t.half().float() if t.is_floating_point() else t for n, t in before.items()})
        model.load_state_dict(before)
        assert same(state(model), saved)


def test_a_checkpoint_of_what_wraps_the_model_is_in_fp32_too(applied: tuple[nn.Sequential, Tuned]) -> None:
    model, _ = applied
    wrapper, plain = nn.ModuleDict({"net": model}), nn.ModuleDict({"net": net(seed=1)})
    wrapper.load_state_dict(plain.state_dict())
    assert same(state(wrapper), state(plain))
    assert rounded(model)
    with pytest.raises(PolicyApplyError, match=r"^load_state_dict\(assign=True\) would replace the half weights"):
        model.load_state_dict(net().state_dict(), assign=True)


def test_a_state_that_was_loaded_too_early_is_refused(applied: tuple[nn.Sequential, Tuned]) -> None:
    """PyTorch casts what it loads to the dtype of the parameters."""
    model, tuned = applied
    optimizer = tuned.optimizer(adamw(model.parameters()))
    train(tuned, optimizer, batches(2))
    early = adamw(model.parameters())
    early.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(PolicyApplyError, match=r"^the optimizer's state was loaded, or made by steps, before"):
        tuned.optimizer(early)


@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
def test_training_goes_on_in_fp32_after_undo(policy: Policy) -> None:
    model, plain = net(), net()
    tuned = apply(policy, model)
    optimizer = tuned.optimizer(momentum(model.parameters()))
    train(tuned, optimizer, batches(4))
    loss_of(model, batches(1)[0]).backward()
    saved, saved_optimizer = state(model), copy.deepcopy(optimizer.state_dict())
    tuned.undo()
    assert same(state(model), saved)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    optimizer.zero_grad()
    plain.load_state_dict(saved)
    other = momentum(plain.parameters())
    other.load_state_dict(saved_optimizer)
    with apply(Policy(), plain) as second:
        assert train(tuned, optimizer, batches(4)) == train(second, other, batches(4))


def test_buffers_are_what_they_were_unless_they_were_written_to_and_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    table = torch.rand(3)
    for module in model:
        module.register_buffer("table", table)
    model.register_buffer("seen", torch.rand(2))
    before = table.clone()
    with apply(O2, model):
        assert model.get_buffer("0.table") is model.get_buffer("1.table") is table
        assert table.dtype is torch.float16
        assert torch.equal(model.state_dict()["1.table"], before)
        model.get_buffer("seen").fill_(0.5)
    assert model.get_buffer("0.table") is model.get_buffer("1.table") is table
    assert torch.equal(table, before)
    assert model.get_buffer("seen").tolist() == [0.5, 0.5]


def test_a_weight_shared_with_what_stays_in_fp32_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(PolicyApplyError, match=r"^1 stays in FP32 and shares a weight with 0, whose weights"):
        apply(replace(O2, fp32_modules=(Fp32Rule(path="1"),)), model)


def test_lazy_modules_are_built_in_half() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Linear(16, 3))
    with apply(O2, model) as tuned:
        optimizer = tuned.optimizer(adamw(model.parameters()))
        losses = train(tuned, optimizer, [(torch.randn(8, 5), torch.randint(3, (8,)))] * 20)
        assert [p.dtype for p in model.parameters()] == [
            *[torch.float16] * 2,
            *[torch.float32] * 2,
            *[torch.float16] * 2,
        ]
        assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
        assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_optimizer_without_masters_is_refused_by_the_scaler_and_lbfgs(applied: tuple[nn.Sequential, Tuned]) -> None:
    model, tuned = applied
    with pytest.raises(PolicyApplyError, match=r"^the policy trains FP32 master weights, which this optimizer does"):
        train(tuned, adamw(model.parameters()), batches(1))
    with pytest.raises(PolicyApplyError, match=r"^LBFGS runs the model within its step, and so cannot have master"):
        tuned.optimizer(torch.optim.LBFGS(model.parameters()))


def test_an_eps_that_is_zero_in_half_is_refused_for_weights_in_half_without_masters() -> None:
    model = net()
    kind: Any = torch.optim.Adagrad
    with apply(replace(O3, fp32_modules=(Fp32Rule(path="6"),)), model) as tuned:
        others = [p for name, p in model.named_parameters() if not name.startswith("6")]
        tuned.optimizer(kind([{"params": [*model[6].parameters()]}, {"params": others, "eps": 1e-7}]))
        match = rf"eps of {kind.__name__}, 1e-\d+, is 0 in half.*eps=1e-4.*master_weights"
        with pytest.raises(PolicyApplyError, match=match):
            tuned.optimizer(kind(others))


def test_a_model_with_nothing_to_put_in_half_is_told_so_and_one_in_half_already_is_refused() -> None:
    for model, rules in ((nn.Sequential(nn.BatchNorm1d(3)), ()), (net(), (Fp32Rule(path="*"),))):
        with apply(replace(O2, fp32_modules=rules), model) as tuned:
            assert [finding.code for finding in tuned.findings] == ["half-weights-without-effect"]
            assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(PolicyApplyError, match=r"be run in half:\n  the model itself has weights"):
        apply(O2, net().half())


def test_a_torch_without_fp32_gradients_of_half_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CAN_DIFFER", False)
    with pytest.raises(PolicyApplyError, match=r"which PyTorch has since 2\.10; this is"):
        apply(O2, net())
    apply(O3, net()).undo()
