"""The judgements of the numerics gate as one value, live or stored: what passes, what does not, what is open. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Generic, Protocol, TypeVar

from amptune.measure.results.outcome import Failure
from amptune.policy.setting_effects import numerics_of, rounding_of
from amptune.policy.settings import Fp32Math, Policy

__all__ = ["Judged", "Judgements", "fp32_of", "is_graph_like", "without_graph"]

# The math modes of FP32 operations, the most precise first.
_BY_PRECISION: tuple[Fp32Math, ...] = ("ieee", "stock", "tf32")


class Judged(Protocol):
    """A judgement, or its record: the policy that was judged, and whether it is as good as FP32."""

    @property
    def policy(self) -> Policy: ...

    @property
    def passes(self) -> bool: ...


J = TypeVar("J", bound=Judged)


@cache
def without_graph(policy: Policy) -> Policy:
    """Returns the policy without torch.compile: the same computation by PyTorch's own kernels."""
    return replace(policy, compile="off")


@cache
def fp32_of(baseline: Policy) -> Policy:
    """Returns the user's own FP32, the reference for all policies; stock PyTorch's if the baseline trains in half."""
    return Policy(fp32_math=baseline.fp32_math if baseline.precision == "off" else "stock")


def is_graph_like(one: Policy, other: Policy) -> bool:
    """Returns whether both are compiled and in one dtype: a compiler that breaks one is likely to break the other."""
    in_one_dtype = one.precision == other.precision and one.float8_modules == other.float8_modules
    return "off" not in (one.compile, other.compile) and in_one_dtype


@dataclass(frozen=True, slots=True)
class Judgements(Generic[J]):
    """The last judgement of each policy's numerics. Policies are held to the FP32 of the `baseline`.

    A compiled policy is judged without its graph, and may be judged with it too. Those that are exempt need neither.
    Numerics that are `unjudged` lacked the memory or time: they are neither sound nor unsound. `failure` says why
    nothing can be judged (any more).
    """

    baseline: Policy
    by_numerics: dict[Policy, J] = field(default_factory=dict)
    unjudged: dict[Policy, Failure] = field(default_factory=dict, compare=False)
    failure: Failure | None = field(default=None, compare=False)

    def also(self, *judged: J) -> Judgements[J]:
        """Returns these judgements and later ones."""
        later = {numerics_of(one.policy): one for one in judged}
        earlier = {numerics: one for numerics, one in self.by_numerics.items() if numerics not in later}
        return replace(self, by_numerics=earlier | later)

    def without(self, policy: Policy, why: Failure) -> Judgements[J]:
        """Returns these judgements, and that this policy could not be judged."""
        return replace(self, unjudged={**self.unjudged, numerics_of(policy): why})

    def is_exempt(self, policy: Policy) -> bool:
        """Returns whether a policy needs no judgement: as precise as the user's FP32, or computes like the baseline."""
        precision, own = _BY_PRECISION.index, rounding_of(policy)
        as_precise = precision(own.fp32_math) <= precision(fp32_of(self.baseline).fp32_math)
        is_plain = own == Policy(fp32_math=own.fp32_math)
        return (as_precise and is_plain) or numerics_of(policy) == numerics_of(self.baseline)

    def is_open(self, policy: Policy) -> bool:
        """Returns whether a policy, without its graph, was not judged yet and can be."""
        return self.is_open_as_it_is(without_graph(policy))

    def is_open_as_it_is(self, policy: Policy) -> bool:
        """Returns whether just this policy, with its graph if it has one, was not judged yet and can be."""
        seen = self.own(policy) is not None or numerics_of(policy) in self.unjudged
        return self.failure is None and not seen and not self.is_exempt(policy)

    def is_graph_open(self, policy: Policy) -> bool:
        """Returns whether a policy is compiled and its graph can be judged, with no graph in its dtype judged yet.

        If one could not be judged, none in its dtype is tried again: what broke it is likely to break the others.
        """
        tried = self.of_graph(policy) or any(is_graph_like(one, policy) for one in self.unjudged)
        return policy.compile != "off" and not tried and self.is_open_as_it_is(policy)

    def unjudged_because(self, policy: Policy) -> Failure | None:
        """Returns why the policy, or a graph in its dtype, could not be judged; None if there is no such reason."""
        own = self.unjudged.get(numerics_of(policy), self.failure)
        graphs = (why for one, why in self.unjudged.items() if is_graph_like(one, policy))
        return own or next(graphs, None)

    def own(self, policy: Policy) -> J | None:
        """Returns the judgement of just these numerics."""
        return self.by_numerics.get(numerics_of(policy))

    def known(self, policy: Policy) -> J | None:
        """Returns the judgement of the policy, or else that of the policy without its graph."""
        return self.own(policy) or self.own(without_graph(policy))

    def of_graph(self, policy: Policy) -> J | None:
        """Returns the judgement of a compiled policy with its graph, or else the last one of a graph in its dtype."""
        own = self.own(policy) if policy.compile != "off" else None
        graphs = (one for one in reversed(self.by_numerics.values()) if is_graph_like(one.policy, policy))
        return own or next(graphs, None)

    def rejection_of(self, policy: Policy) -> J | None:
        """Returns the judgement that the policy failed, without its graph or with it; None if it failed neither."""
        plain = without_graph(policy)
        found = [] if self.is_exempt(plain) else [self.own(plain)]
        found += [] if self.is_exempt(policy) else [self.of_graph(policy)]
        return next((one for one in found if one is not None and not one.passes), None)

    def bars(self, policy: Policy) -> bool:
        """Returns whether a policy cannot win: it failed, or its dtype did and it lacks the rules that cure it."""
        if self.rejection_of(policy) is not None:
            return True
        judged = self.is_exempt(policy) or self.known(policy) is not None
        cured = judged or any(rule.is_needed for rule in policy.fp32_modules)
        return not cured and self.rejection_of(policy.recipe) is not None

    def passes(self, policy: Policy) -> bool:
        """Returns whether the policy is exempt or passed; a compiled one may have passed without its graph."""
        known = self.known(policy)
        return self.is_exempt(without_graph(policy)) if known is None else known.passes

    def rounds_well(self, recipe: Policy) -> bool:
        """Returns whether a policy that rounds like this one is exempt or passed, in whatever order it takes sums."""
        alike = (one for one in self.by_numerics.values() if rounding_of(one.policy) == rounding_of(recipe))
        return self.is_exempt(recipe) or any(one.passes for one in alike)

    def bar(self, policy: Policy, *, is_outside: bool) -> str | None:
        """Returns why a policy cannot win, which may be outside the space; None if it can."""
        if self.bars(policy):
            return "not as good as FP32"
        return "outside the space: it was measured for comparison" if is_outside else None
