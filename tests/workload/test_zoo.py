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
from torch import Tensor, nn

from amptune.errors import TargetError
from amptune.workload import zoo

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

# Each at a size that one core steps through in about a second.
SMALL: dict[str, dict[str, int]] = {
    "conv1": {"side": 32},
    "mlp3": {"width": 64},
    "resnet18": {"side": 32},
    "resnet50": {"side": 32},
    "vgg16": {"hidden": 64},
    "densenet161": {},
    "seresnext50": {},
    "deeplabv3plus": {"height": 32, "width": 48},
    "deeplabv3plus_multigrid": {"height": 32, "width": 48},
    "bert_base": {"width": 128, "layers": 2, "tokens": 32},
    "gpt2": {"width": 128, "layers": 2, "tokens": 32},
    "digits": {},
}

# As published, for the number of classes that the workload has; the sources stand in the modules.
PARAMETERS = {
    "conv1": 3 * 64 * 3 * 3 + 64,
    "mlp3": 3 * (4096 * 4096 + 4096),
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 134_309_962,
    "bert_base": 109_514_298,
    "gpt2": 124_439_808,
}
PARAMETERS_FOR_IMAGENET = {"densenet161": 28_681_000, "seresnext50": 27_559_896}

BATCHES: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = {
    "conv1": (64, ((3, 224, 224),)),
    "mlp3": (512, ((4096,), (4096,))),
    "resnet18": (64, ((3, 224, 224), ())),
    "resnet50": (128, ((3, 224, 224), ())),
    "vgg16": (128, ((3, 32, 32), ())),
    "densenet161": (256, ((3, 32, 32), ())),
    "seresnext50": (256, ((3, 32, 32), ())),
    "deeplabv3plus": (4, ((3, 512, 896), (512, 896))),
    "deeplabv3plus_multigrid": (4, ((3, 512, 896), (512, 896))),
    "bert_base": (16, ((512,), (512,))),
    "gpt2": (8, ((1025,),)),
    "digits": (64, ((1, 32, 32), ())),
}


def small(name: str) -> Workload:
    workload: Workload = getattr(zoo, name)(batch_size=2, **SMALL[name])
    return workload


def on_paper(workload: Workload) -> nn.Module:
    """The model without its weights."""
    with torch.device("meta"):
        return workload.model()


def parameters(workload: Workload) -> int:
    return sum(weights.numel() for weights in on_paper(workload).parameters())


def tensors(batch: Any) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else batch


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.eval()(tokens)
    return output


def loss_of(workload: Workload, model: nn.Module) -> Tensor:
    assert workload.loss is not None
    return workload.loss(model, workload.batch(workload.batch_size))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    assert parameters(zoo.workload(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS_FOR_IMAGENET)
def test_a_model_for_imagenet_has_as_many_parameters_as_published(name: str) -> None:
    assert parameters(getattr(zoo, name)(classes=1000)) == PARAMETERS_FOR_IMAGENET[name]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_workload_has_the_batch_that_its_name_stands_for(name: str) -> None:
    workload = zoo.workload(name)
    batch_size, shapes = BATCHES[name]
    assert workload.name == name
    assert workload.batch_size == batch_size
    assert [tuple(part.shape) for part in tensors(workload.batch(2))] == [(2, *shape) for shape in shapes]


@pytest.mark.parametrize("autocast", ["off", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_training_step_is_finite_and_reaches_every_parameter(name: str, autocast: str) -> None:
    torch.manual_seed(0)
    workload = small(name)
    model = workload.model()
    optimizer = workload.optimizer(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast == "bf16"):
        loss = loss_of(workload, model)
    torch.autograd.backward(loss)
    assert loss.shape == ()
    assert loss.isfinite()
    missed = [path for path, weights in model.named_parameters() if weights.grad is None or not weights.grad.any()]
    assert missed == []
    optimizer.step()
    assert all(weights.isfinite().all() for weights in model.parameters())


@pytest.mark.parametrize("name", zoo.NAMES)
def test_data_is_new_at_each_call_and_the_same_again_from_the_same_seed(name: str) -> None:
    workload = small(name)
    torch.manual_seed(7)
    first, second = tensors(workload.batch(4)), tensors(workload.batch(4))
    torch.manual_seed(7)
    again = tensors(workload.batch(4))
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_workload_survives_the_way_to_another_process(name: str) -> None:
    workload = zoo.workload(name)
    assert parameters(pickle.loads(pickle.dumps(workload))) == parameters(workload)


def test_the_registry_names_what_is_tested_here() -> None:
    assert tuple(SMALL) == zoo.NAMES
    assert all(name in dir(zoo) for name in zoo.NAMES)


def test_a_name_that_is_no_workload_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(TargetError, match=r"'resnet51' is no bundled workload; there are conv1, mlp3, resnet18, .*"):
        zoo.workload("resnet51")
    with pytest.raises(AttributeError, match=r"no attribute 'resnet51'; its workloads are conv1, .*"):
        _ = zoo.resnet51


def test_no_module_of_the_zoo_takes_the_place_of_a_workload() -> None:
    modules = {path.stem for path in Path(zoo.__file__).parent.glob("*.py")}
    for module in modules - {"__init__"}:
        import_module(f"amptune.workload.zoo.{module}")
    assert modules.isdisjoint(zoo.NAMES)
    assert all(callable(getattr(zoo, name)) for name in zoo.NAMES)


@pytest.mark.parametrize(("asked", "loads_torch"), [("NAMES", False), ("workload('conv1')", True)])
def test_torch_is_imported_when_a_workload_is_asked_for_and_not_before(asked: str, loads_torch: bool) -> None:
    program = f"import sys; from amptune.workload import zoo; zoo.{asked}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(loads_torch)


def test_resnet50_strides_in_its_3x3_convolutions() -> None:
    convolutions = [module for module in on_paper(zoo.workload("resnet50")).modules() if isinstance(module, nn.Conv2d)]
    strided = [module.kernel_size for module in convolutions if module.stride == (2, 2)]
    # The stem, then in each of three stages the bottleneck's 3x3 and the shortcut.
    assert strided == [(7, 7), *[(3, 3), (1, 1)] * 3]


def test_vgg16_keeps_its_three_large_linear_layers_under_classifier() -> None:
    model = on_paper(zoo.workload("vgg16"))
    weights = sum(w.numel() for path, w in model.named_parameters() if path.startswith("classifier."))
    assert [path for path, _ in model.named_children()] == ["features", "avgpool", "flatten", "classifier"]
    assert weights == 119_586_826


def test_deeplab_answers_each_pixel_and_leaves_some_unlabelled() -> None:
    workload = small("deeplabv3plus")
    images, labels = workload.batch(2)
    assert logits(workload.model(), images).shape == (2, 19, *labels.shape[1:])
    assert set(labels.unique().tolist()) == {*range(19), 255}


def test_the_variant_of_deeplab_has_a_second_output_in_training_and_dilates_more_and_more() -> None:
    workload = small("deeplabv3plus_multigrid")
    model, (images, _) = workload.model(), workload.batch(2)
    first, second = model(images)
    assert first.shape == second.shape == (2, 19, 32, 48)
    assert logits(model, images).shape == (2, 19, 32, 48)
    widest = [model.get_submodule(f"deep.layer4.{block}.body.conv2").dilation for block in range(3)]
    assert widest == [(2, 2), (4, 4), (8, 8)]
    assert sum(isinstance(module, nn.Dropout2d) for module in model.modules()) == 2


def test_deeplab_sees_the_image_at_a_sixteenth_of_its_size() -> None:
    model = on_paper(zoo.workload("deeplabv3plus"))
    images = torch.empty(1, 3, 512, 896, device="meta")
    assert model.get_submodule("deep")(model.get_submodule("shallow")(images)).shape == (1, 2048, 32, 56)


def test_gpt2_does_not_look_ahead() -> None:
    workload = small("gpt2")
    model = workload.model()
    tokens = workload.batch(1)[:, :-1]
    changed = tokens.clone()
    changed[:, 20:] = (tokens[:, 20:] + 1) % 50257
    before, after = logits(model, tokens), logits(model, changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_bert_hides_a_few_tokens_and_asks_for_those_alone() -> None:
    torch.manual_seed(0)
    text, hidden = zoo.workload("bert_base").batch(16)
    asked = hidden != -100
    assert (text[asked] == 103).all()
    assert 0.13 < asked.float().mean() < 0.17


@pytest.mark.parametrize(("name", "head"), [("bert_base", "decoder"), ("gpt2", "head")])
def test_the_head_of_a_language_model_is_its_embedding(name: str, head: str) -> None:
    model = small(name).model()
    [embedding] = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 30_000]
    assert model.get_submodule(head).weight is embedding.weight


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_loader_gives_batches_of_the_size_and_kind_that_batch_does(name: str) -> None:
    workload = small(name)
    assert workload.loader is not None
    expected = [(part.shape, part.dtype) for part in tensors(workload.batch(3))]
    batches = list(itertools.islice(workload.loader(3), 2))
    for batch in batches:
        assert [(part.shape, part.dtype) for part in tensors(batch)] == expected
    assert not torch.equal(tensors(batches[0])[0], tensors(batches[1])[0])


def test_the_loaders_of_large_images_copy_nothing() -> None:
    workload = small("resnet50")
    assert workload.loader is not None
    (first, _), (second, _) = itertools.islice(workload.loader(2), 2)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
