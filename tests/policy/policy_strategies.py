"""Any policy, file and profile that the types allow, for property tests."""

from __future__ import annotations

from typing import Any, get_type_hints

from hypothesis import strategies as st

from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.profile import Entry, Profile
from amptune.policy.settings import KNOBS, Float8Rule, Fp32Rule, HalfRule, Loader, LossScale, Policy, Reason, settled

numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-30, max_value=1e30)
words = st.text(min_size=1, max_size=12)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | numbers | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
free = st.dictionaries(words, plain, max_size=3)
labels = st.dictionaries(
    words, words | st.sampled_from(["2.10", "9", "143771", "true", "off", "~", "1e-3"]), max_size=3
)

reasons = st.builds(Reason, saves_ms=st.none() | numbers, risk=st.none() | numbers)
rules = st.one_of(
    st.builds(Fp32Rule, path=words, cast_output=st.booleans(), reason=st.none() | reasons),
    st.builds(Fp32Rule, type=words, cast_output=st.booleans(), reason=st.none() | reasons),
)
half_rules = st.builds(HalfRule, path=words, reason=st.none() | reasons) | st.builds(HalfRule, type=words)
float8_rules = st.builds(Float8Rule, path=words, reason=st.none() | reasons) | st.builds(Float8Rule, type=words)
intervals = st.integers(1, 10**6)
loss_scales = st.one_of(
    st.builds(LossScale, init=positive, growth_interval=intervals),
    st.builds(LossScale, init=positive, growth_interval=intervals, max=st.just(1e30)),
    st.builds(LossScale, init=positive, static=st.just(True)),
)
loaders = st.one_of(
    st.builds(Loader, pin_memory=st.booleans()),
    st.builds(
        Loader,
        num_workers=st.integers(1, 99),
        pin_memory=st.booleans(),
        persistent_workers=st.booleans(),
        prefetch_factor=st.none() | st.integers(1, 9),
    ),
)


_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "fp32_modules": st.lists(rules, max_size=3).map(tuple),
    "half_modules": st.lists(half_rules, max_size=2).map(tuple),
    "float8_modules": st.lists(float8_rules, max_size=2).map(tuple),
    "batch_size": st.none() | intervals,
    "accumulate": st.integers(1, 1000),
    "checkpoint": st.just(()) | st.lists(words, max_size=2, unique=True).map(tuple),
    "threads": st.integers(0, 64),
    "loss_scale": st.none() | loss_scales,
    "loader": st.none() | loaders,
}


def policies() -> st.SearchStrategy[Policy]:
    """Of any settings that go together."""
    values = {knob.name: st.sampled_from(knob.values) for knob in KNOBS if knob.name not in _SPECIAL}
    return st.fixed_dictionaries({}, optional={**values, **_SPECIAL}).map(settled)


_FIGURES: dict[Any, st.SearchStrategy[Any]] = {
    str: words,
    int: st.integers(0, 10**6),
    float: numbers,
    bool: st.booleans(),
    list[float]: st.lists(numbers, min_size=2, max_size=2),
    dict[str, Any]: free,
    list[dict[str, Any]]: st.lists(free, max_size=2),
}
evidence = st.fixed_dictionaries({}, optional={name: _FIGURES[of] for name, of in get_type_hints(Evidence).items()})
policy_files = st.builds(PolicyFile, policy=policies(), name=st.none() | words, valid_for=labels, evidence=evidence)
unsigned = words.filter(lambda text: not set("<>=!") & set(text))
wanted = st.dictionaries(words, unsigned | st.sampled_from([">=2.10", "!=9", ">=1,<3"]), max_size=3)
entries = st.builds(Entry, match=wanted, policy=policy_files)
profiles = st.builds(Profile, entries=st.lists(entries, max_size=2).map(tuple), default=st.none() | policy_files)
