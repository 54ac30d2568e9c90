from __future__ import annotations

from dataclasses import replace

from simulated.recorded import BODY, HEAD, NORM, STEM, RecordedEvaluator

from amptune.measure.results.subject import Leaf, Subject
from amptune.policy.settings import Fp32Rule
from amptune.search.space.exclusions import groups_by_intensity, ladder_by_intensity


def subject_of(*leaves: Leaf) -> Subject:
    subject = RecordedEvaluator("resnet50").prepare(1.0).subject
    return replace(subject, leaves=leaves, parameters=sum(leaf.parameters for leaf in leaves))


def linear(path: str, called: int, parameters: int = 100, flops: int = 10**6) -> Leaf:
    return Leaf(path=path, type="Linear", parameters=parameters, flops=flops, cast_numel=10**4, called=called)


def test_the_ladder_begins_where_half_precision_has_least_to_gain() -> None:
    rules = [group.rule for group in groups_by_intensity(subject_of(STEM, BODY, NORM, HEAD))]
    ends = [Fp32Rule(path=leaf.path) for leaf in (HEAD, STEM)]
    assert rules == [*ends, Fp32Rule(type="Conv2d"), Fp32Rule(type="BatchNorm2d")]


def test_a_classifier_of_several_layers_is_one_region() -> None:
    layers = [linear("classifier.0", 2), linear("classifier.3", 3), linear("classifier.6", 4)]
    groups = groups_by_intensity(subject_of(STEM, BODY, *layers))
    assert Fp32Rule(path="classifier") in [group.rule for group in groups]


def test_a_model_that_is_one_module_is_named_by_its_type() -> None:
    groups = groups_by_intensity(subject_of(linear("", 0)))
    assert [group.rule for group in groups] == [Fp32Rule(type="Linear")]


def test_modules_the_pass_did_not_reach_are_left_in_autocast() -> None:
    assert groups_by_intensity(subject_of(replace(HEAD, flops=0, cast_numel=0, called=None))) == ()


def test_no_group_repeats_what_stands_before_it() -> None:
    covered: set[str] = set()
    for group in groups_by_intensity(subject_of(STEM, BODY, NORM, HEAD)):
        paths = {leaf.path for leaf in group.leaves}
        assert not paths <= covered
        covered |= paths


def test_depth_counts_groups_from_the_first() -> None:
    ladder = ladder_by_intensity(subject_of(STEM, BODY, NORM, HEAD))
    assert ladder.rules(0) == ()
    assert ladder.rules(2) == (Fp32Rule(path="head"), Fp32Rule(path="stem"))
