from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amptune.errors import TargetError
from amptune.workload import zoo

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

# By name: a size that one core steps through in about a second; the model's parameters, as published for the first two
# (sources in the modules); the batch size, and the shapes of a batch's parts.
ZOO: dict[str, tuple[dict[str, int], int, int, tuple[tuple[int, ...], ...]]] = {
    "resnet50": ({"side": 32}, 25_557_032, 128, ((3, 224, 224), ())),
    "bert_base": ({"width": 128, "layers": 2, "tokens": 32}, 109_514_298, 16, ((512,), (512,))),
    "digits": ({}, 122_778, 64, ((1, 32, 32), ())),
}


def small(name: str) -> Workload:
    workload: Workload = getattr(zoo, name)(batch_size=2, **ZOO[name][0])
    return workload


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_workload_has_the_size_that_its_name_stands_for_and_survives_the_way_to_another_process(name: str) -> None:
    workload = pickle.loads(pickle.dumps(zoo.workload(name)))
    _, parameters, batch_size, shapes = ZOO[name]
    assert (workload.name, workload.batch_size) == (name, batch_size)
    assert [tuple(part.shape) for part in workload.batch(2)] == [(2, *shape) for shape in shapes]
    with torch.device("meta"):
        model = workload.model()
    assert sum(weights.numel() for weights in model.parameters()) == parameters


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_training_step_is_finite_and_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    workload = small(name)
    model = workload.model()
    optimizer = workload.optimizer(model)
    assert workload.loss is not None
    loss = workload.loss(model, workload.batch(workload.batch_size))
    torch.autograd.backward(loss)
    assert loss.shape == ()
    assert loss.isfinite()
    missed = [path for path, weights in model.named_parameters() if weights.grad is None or not weights.grad.any()]
    assert missed == []
    optimizer.step()
    assert all(weights.isfinite().all() for weights in model.parameters())


@pytest.mark.parametrize("name", zoo.NAMES)
def test_data_is_new_at_each_call_and_the_same_from_the_same_seed_and_a_loaders_is_alike(name: str) -> None:
    workload = small(name)
    torch.manual_seed(7)
    first, second = workload.batch(3), workload.batch(3)
    torch.manual_seed(7)
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first, workload.batch(3), strict=True))
    assert workload.loader is not None
    one, other = itertools.islice(workload.loader(3), 2)
    for batch in (one, other):
        assert [(part.shape, part.dtype) for part in batch] == [(part.shape, part.dtype) for part in first]
    assert not torch.equal(one[0], other[0])


def test_a_name_that_is_no_workload_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(TargetError, match=r"'vgg16' is no bundled workload; there are resnet50, bert_base, digits"):
        zoo.workload("vgg16")
    with pytest.raises(AttributeError, match=r"no attribute 'vgg16'; its workloads are resnet50, bert_base, digits"):
        _ = zoo.vgg16


def test_no_module_of_the_zoo_takes_the_place_of_a_workload() -> None:
    for module in Path(zoo.__file__).parent.glob("[a-z]*.py"):
        import_module(f"amptune.workload.zoo.{module.stem}")
    assert all(callable(getattr(zoo, name)) and name in dir(zoo) for name in zoo.NAMES)


def test_torch_is_not_imported_before_a_workload_is_asked_for() -> None:
    program = "import sys; from amptune.workload import zoo; zoo.NAMES; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_resnet50_strides_in_its_3x3_convolutions_and_its_loader_copies_nothing() -> None:
    convolutions = [module for module in small("resnet50").model().modules() if isinstance(module, nn.Conv2d)]
    strided = [module.kernel_size for module in convolutions if module.stride == (2, 2)]
    # The stem, then in each of three stages the bottleneck's 3x3 and the shortcut.
    assert strided == [(7, 7), *[(3, 3), (1, 1)] * 3]
    loader = small("resnet50").loader
    assert loader is not None
    (first, _), (second, _) = itertools.islice(loader(2), 2)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(), "large images are not copied"


def test_bert_hides_a_few_tokens_and_asks_for_those_alone() -> None:
    torch.manual_seed(0)
    text, hidden = zoo.workload("bert_base").batch(16)
    asked = hidden != -100
    assert (text[asked] == 103).all()
    assert 0.13 < asked.float().mean() < 0.17
    model: Any = small("bert_base").model()
    assert model.decoder.weight is model.embeddings.word.weight
