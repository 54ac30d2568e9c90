from __future__ import annotations

import sys

import pytest
import torch

from amptune.errors import TargetError
from amptune.workload import zoo


def test_digits_are_learned_in_a_few_dozen_steps() -> None:
    torch.manual_seed(0)
    workload = zoo.workload("digits")
    assert workload.loss is not None
    assert workload.evaluate is not None
    model = workload.model()
    optimizer = workload.optimizer(model)
    untrained = workload.evaluate(model)
    for _ in range(40):
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model, workload.batch(workload.batch_size)))
        optimizer.step()
    assert untrained < 0.4
    assert workload.evaluate(model) > 0.8


def test_judging_a_model_leaves_it_as_it_was() -> None:
    workload = zoo.workload("digits")
    assert workload.evaluate is not None
    for training in (True, False):
        model = workload.model().train(training)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        workload.evaluate(model)
        assert all(module.training is training for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_epoch_goes_through_the_training_part_and_a_batch_may_be_larger_than_the_data() -> None:
    workload = zoo.workload("digits")
    assert workload.loader is not None
    assert [len(labels) for _, labels in workload.loader(64)] == [64] * 22
    assert [len(labels) for _, labels in workload.loader(5000)] == [5000]
    images, labels = workload.batch(5000)
    assert images.shape == (5000, 1, 32, 32)
    assert (images.min(), images.max()) == (0, 1)
    assert labels.unique().tolist() == list(range(10))


def test_without_scikit_learn_digits_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(TargetError, match=r"pip install 'amptune\[digits\]'"):
        zoo.workload("digits")
