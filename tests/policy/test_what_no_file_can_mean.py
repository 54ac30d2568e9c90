"""Values that no machine can take, and files that no tuning writes: refused with their place, in bounded time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.errors import FileFormatError
from amptune.policy.file_io import parse_policy
from amptune.policy.patterns import matcher_of
from amptune.policy.settings import Fp32Rule, LossScale
from amptune.policy.yaml_text import parse
from amptune.search.space.space_file import parse_space

POLICY, PROFILE = "schema: amptune.policy/1\n", "schema: amptune.profile/1\n"
SPACE = 'schema: amptune.space/1\narchitecture: x\ncompute_capability: []\nknobs: {autocast: ["off", bf16]}\n'


def refused(text: str) -> str:
    with pytest.raises(FileFormatError) as caught:
        parse_space(parse(text, "f")) if text.startswith(SPACE) else parse_policy(parse(text, "f"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ("init: .inf", "init: inf is not in the range of FP32"),
        ("init: 1e39", "init: 1e+39 is not in the range of FP32"),
        ("init: 1e-60", "init: 1e-60 is not in the range of FP32"),
        ("init: .nan", "init: nan is not a number"),
        ("max: .inf", "max: inf is above what FP32 holds"),
        ("max: 1e39", "max: 1e+39 is above what FP32 holds"),
        ("growth_interval: 2147483648", "growth_interval: 2147483648 is larger than 2147483647"),
    ],
)
def test_a_loss_scale_is_one_that_the_scaler_can_hold(scale: str, said: str) -> None:
    assert f"loss_scale.{said}" in refused(f"{POLICY}autocast: fp16\nloss_scale: {{{scale}}}\n")


def test_a_loss_scale_of_python_has_the_same_bounds() -> None:
    with pytest.raises(ValueError, match="growth_interval: 2147483648 is not at most 2147483647"):
        LossScale(growth_interval=2**31)


@pytest.mark.parametrize("limit", ["nan", "inf", "Infinity", "1_000", "٣", "0x10", "1e999", "²"])
@pytest.mark.parametrize("label", ["nvidia.com/gpu.memory", "torch"])
def test_a_comparison_has_a_plain_number(label: str, limit: str) -> None:
    text = f'{PROFILE}entries: [{{match: {{{label}: ">={limit}"}}, policy: {{}}}}]\n'
    assert f"{label}: '>={limit}' is no comparison" in refused(text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("forbid: [{when: {autocast: {a: 1}}, because: x}]", "autocast: {'a': 1} is not one of off, bf16"),
        ("forbid: [{when: {autocast: [[a]]}, because: x}]", "autocast: ['a'] is not one of off, bf16"),
        ("forbid: [{when: {autocast: []}, because: x}]", "autocast: [] is not one of off, bf16"),
        ("try_first: [{autocast: [bf16]}]", "autocast: ['bf16'] is not one of off, bf16"),
        ("try_first: [{autocast: {a: 1}}]", "autocast: {'a': 1} is not one of off, bf16"),
        ('extends: "a\\0b"', "'a\\x00b' is no file and no space of amptune's"),
        (f"extends: {'a' * 300}", "is no file and no space of amptune's"),
        ("forbid: [{when: {autocat: bf16}, because: x}]", "unknown knob 'autocat'; did you mean autocast?"),
    ],
)
def test_a_space_takes_values_where_values_stand(more: str, said: str) -> None:
    assert said in refused(f"{SPACE}{more}\n")


def test_a_space_is_bounded() -> None:
    sizes = ", ".join(map(str, range(1, 901)))
    knobs = f"knobs: {{fp32_math: [stock, tf32, ieee], threads: [{sizes}], accumulate: [{sizes}]}}\n"
    with pytest.raises(FileFormatError, match="2,430,000 points: beside 0 rules, a space has at most 2,000,000"):
        parse_space(parse(SPACE[: SPACE.index("knobs")] + knobs, "f"))


@pytest.mark.parametrize("body", ["valid_for: {%s}", "fp32_modules: [%s]"])
def test_lists_and_mappings_are_bounded(body: str) -> None:
    entries = ", ".join(f"l{number}: x" if "{" in body else "{path: a}" for number in range(1001))
    assert "1,001 entries: a list or a mapping has at most 1,000" in refused(POLICY + body % entries + "\n")


@pytest.mark.parametrize("path", ["**." * 200 + "x", "**.a." * 200 + "x", "*a" * 200 + ".x", "*" * 100_000])
def test_no_pattern_takes_long_to_match(path: str) -> None:
    assert not matcher_of(Fp32Rule(path=path))(".".join("a" * 200), ())


NAMES = st.text("ab", min_size=1, max_size=3)


@given(names=st.lists(NAMES, max_size=4), stars=st.sets(st.integers(0, 4)), more=st.lists(NAMES, max_size=2))
def test_stars_stand_for_names_and_two_for_any_number(names: list[str], stars: set[int], more: list[str]) -> None:
    path = [name for place, name in enumerate(names) for name in ([*more, name] if place in stars else [name])]
    deep = ".".join(f"**.{name}" if place in stars else name for place, name in enumerate(names))
    one = ".".join("*" if place in stars else f"{name[0]}*" for place, name in enumerate(names))
    if names:
        assert matcher_of(Fp32Rule(path=deep))(".".join(path), ())
        assert matcher_of(Fp32Rule(path=one))(".".join(names), ())
        assert not matcher_of(Fp32Rule(path=one))(".".join([*names, "c"]), ())
