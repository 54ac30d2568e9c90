"""Any policy, file and profile that the types allow, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.profile import Entry, Profile
from amptune.policy.settings import Autocast, CompileMode, Float8Rule, Fp32Rule, HalfRule, LossScale, Policy, Reason

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


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    autocast: Autocast = draw(st.sampled_from(["off", "bf16", "fp16"]))
    half = autocast == "off" and draw(st.booleans())
    compiled: CompileMode = draw(st.sampled_from(["off", "default", "reduce-overhead", "max-autotune"]))
    checkpoint = tuple(draw(st.lists(words, max_size=2, unique=True))) if draw(st.booleans()) else ()
    return Policy(
        autocast=autocast,
        weights="half" if half else "fp32",
        master_weights=half and draw(st.booleans()),
        keep_batchnorm_fp32=half and draw(st.booleans()),
        fp32_math=draw(st.sampled_from(["stock", "ieee", "tf32"])),
        fp32_modules=tuple(draw(st.lists(rules, max_size=3))),
        half_modules=tuple(draw(st.lists(half_rules, max_size=2))),
        float8_modules=tuple(draw(st.lists(float8_rules, max_size=2))) if autocast == "bf16" else (),
        memory_format=draw(st.sampled_from(["contiguous", "channels_last", "channels_last_3d"])),
        cudnn_benchmark=draw(st.booleans()),
        batch_size=draw(st.none() | st.integers(1, 10**6)),
        accumulate=draw(st.integers(1, 1000)),
        checkpoint=checkpoint,
        compile=compiled,
        cuda_graphs=compiled == "off"
        and not checkpoint
        and draw(st.sampled_from((False, True) if half else (False, True, "step"))),
        fused_optimizer=draw(st.booleans()),
        threads=draw(st.integers(0, 64)),
        loss_scale=draw(st.none() | loss_scales) if half or autocast == "fp16" else None,
    )


_EVIDENCE: dict[str, st.SearchStrategy[Any]] = {
    "workload": words,
    "objective": st.sampled_from(["memory", "energy"]),
    "least_speed": positive,
    "devices": st.integers(2, 8),
    "baseline": free,
    "amp_recipe": free,
    "samples_per_s": numbers,
    "step_ms": numbers,
    "step_ms_ci95": st.lists(numbers, min_size=2, max_size=2),
    "peak_memory_mib": numbers,
    "energy_j_per_sample": numbers,
    "speedup": numbers,
    "speedup_ci95": st.lists(numbers, min_size=2, max_size=2),
    "gain": numbers,
    "gain_ci95": st.lists(numbers, min_size=2, max_size=2),
    "launches": st.integers(0, 100),
    "parity": free,
    "ablation": free,
    "end_to_end": free,
    "finalists": st.lists(free, max_size=2),
    "pareto": st.lists(free, max_size=2),
    "findings": st.lists(free, max_size=2),
    "tuned_on": st.just("2026-11-21T05:00:00Z"),
    "trials": st.integers(0, 10**6),
    "seconds": numbers,
    "confidence": st.sampled_from(["confirmed", "likely", "undecided"]),
    "provisional": st.booleans(),
}
assert set(_EVIDENCE) == set(Evidence.__annotations__), "a new field of Evidence needs a strategy"

evidence = st.fixed_dictionaries({}, optional=_EVIDENCE)
policy_files = st.builds(PolicyFile, policy=policies(), name=st.none() | words, valid_for=labels, evidence=evidence)
unsigned = words.filter(lambda text: not set("<>=!") & set(text))
wanted = st.dictionaries(words, unsigned | st.sampled_from([">=2.10", "!=9", ">=1,<3"]), max_size=3)
entries = st.builds(Entry, match=wanted, policy=policy_files)
profiles = st.builds(Profile, entries=st.lists(entries, max_size=2).map(tuple), default=st.none() | policy_files)
