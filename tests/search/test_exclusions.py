from __future__ import annotations

from dataclasses import replace

import pytest
from simulated.recorded import BODY, HEAD, NORM, STEM, RecordedEvaluator

from amptune.measure.results.subject import Leaf, Subject
from amptune.policy.settings import Fp32Rule
from amptune.search.space.exclusions import groups_by_intensity

HEAD_RULE, STEM_RULE = Fp32Rule(path="head"), Fp32Rule(path="stem")


def subject_of(*leaves: Leaf) -> Subject:
    subject = RecordedEvaluator("resnet50").prepare(1.0).subject
    return replace(subject, leaves=leaves, parameters=sum(leaf.parameters for leaf in leaves))


def linear(path: str, called: int) -> Leaf:
    return Leaf(path=path, type="Linear", parameters=100, flops=10**6, cast_numel=10**4, called=called)


@pytest.mark.parametrize(
    ("leaves", "rules"),
    [
        ((STEM, BODY, NORM, HEAD), [HEAD_RULE, STEM_RULE, Fp32Rule(type="Conv2d"), Fp32Rule(type="BatchNorm2d")]),
        ((linear("", 0),), [Fp32Rule(type="Linear")]),
        ((replace(HEAD, flops=0, cast_numel=0, called=None),), []),
    ],
    ids=["least to gain first", "a model that is one module", "a module the pass did not reach"],
)
def test_groups_come_in_the_order_of_what_half_precision_has_to_gain(
    leaves: tuple[Leaf, ...], rules: list[Fp32Rule]
) -> None:
    groups = groups_by_intensity(subject_of(*leaves))
    assert [group.rule for group in groups] == rules
    seen: set[str] = set()
    for group in groups:
        paths = {leaf.path for leaf in group.leaves}
        assert not paths <= seen, "no group repeats what stands before it"
        seen |= paths


def test_a_classifier_of_several_layers_is_one_region() -> None:
    layers = [linear("classifier.0", 2), linear("classifier.3", 3), linear("classifier.6", 4)]
    groups = groups_by_intensity(subject_of(STEM, BODY, *layers))
    assert Fp32Rule(path="classifier") in [group.rule for group in groups]
