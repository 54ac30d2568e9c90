"""The judgements of the numerics gate as one table, live or read from a study: who may win, what is open. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from amptune.measure.results.outcome import Failure
from amptune.policy.setting_effects import numerics_of, rounding_of
from amptune.policy.settings import Fp32Math, Policy
from amptune.search.gate.judgement import Judgement, Unjudged

__all__ = ["Found", "Judgements", "fp32_of", "without_graph"]

# The math modes of FP32 operations, the most precise first.
_BY_PRECISION: tuple[Fp32Math, ...] = ("ieee", "stock", "tf32")

# A policy was judged, or could not be; a failure says that none can be judged, as there is no FP32 reference.
Found = Judgement | Unjudged | Failure


@cache
def without_graph(policy: Policy) -> Policy:
    """Returns the policy without torch.compile: the same computation by PyTorch's own kernels."""
    return replace(policy, compile="off")


@cache
def fp32_of(baseline: Policy) -> Policy:
    """Returns the user's own FP32, the reference for all policies; stock PyTorch's if the baseline trains in half."""
    return Policy(fp32_math=baseline.fp32_math if baseline.precision == "off" else "stock")


@dataclass(frozen=True, slots=True)
class Judgements:
    """The last finding on each policy's numerics, held to the FP32 of the `baseline`.

    A compiled policy is judged without its graph, and may be judged with it too: a compiler that breaks one graph is
    likely to break others in that dtype, so one speaks for all until they are judged themselves. `failure` says why
    nothing can be judged (any more).
    """

    baseline: Policy
    found: dict[Policy, Judgement | Unjudged] = field(default_factory=dict)
    failure: Failure | None = None

    def also(self, *found: Found) -> Judgements:
        """Returns these judgements and later ones."""
        failure = next((one for one in found if isinstance(one, Failure)), self.failure)
        later = {numerics_of(one.policy): one for one in found if not isinstance(one, Failure)}
        earlier = {numerics: one for numerics, one in self.found.items() if numerics not in later}
        return replace(self, found=earlier | later, failure=failure)

    def is_exempt(self, policy: Policy) -> bool:
        """Returns whether a policy needs no judgement: as precise as the user's FP32, or computes like the baseline."""
        precision, own = _BY_PRECISION.index, rounding_of(policy)
        as_precise = precision(own.fp32_math) <= precision(fp32_of(self.baseline).fp32_math)
        is_plain = own == Policy(fp32_math=own.fp32_math)
        return (as_precise and is_plain) or numerics_of(policy) == numerics_of(self.baseline)

    def is_open(self, policy: Policy) -> bool:
        """Returns whether a policy, without its graph, was not judged yet and can be."""
        plain = without_graph(policy)
        return self.failure is None and numerics_of(plain) not in self.found and not self.is_exempt(plain)

    def is_graph_open(self, policy: Policy) -> bool:
        """Returns whether a policy is compiled and can be judged with its graph, as none in its dtype was tried yet."""
        is_compiled = policy.compile != "off"
        return is_compiled and self.failure is None and not self._of_graph(policy) and not self.is_exempt(policy)

    def known(self, policy: Policy) -> Judgement | None:
        """Returns the judgement of the policy, or else that of the policy without its graph."""
        both = (self.found.get(numerics_of(one)) for one in (policy, without_graph(policy)))
        return next((one for one in both if isinstance(one, Judgement)), None)

    def unjudged_because(self, policy: Policy) -> Failure | None:
        """Returns why the policy, or a graph in its dtype, could not be judged; None if there is no such reason."""
        own, *graphs = self.found.get(numerics_of(policy)), *self._of_graph(policy)
        if isinstance(own, Unjudged):
            return own.because
        return self.failure or next((one.because for one in graphs if isinstance(one, Unjudged)), None)

    def rejection_of(self, policy: Policy) -> Judgement | None:
        """Returns the judgement that the policy failed, without its graph or with it; None if it failed neither."""
        plain = without_graph(policy)
        alone = [] if self.is_exempt(plain) else [self.found.get(numerics_of(plain))]
        graphs = [] if self.is_exempt(policy) else self._of_graph(policy)
        graph = next((one for one in graphs if isinstance(one, Judgement)), None)
        return next((one for one in (*alone, graph) if isinstance(one, Judgement) and not one.passes), None)

    def bars(self, policy: Policy) -> bool:
        """Returns whether a policy cannot win: it failed, or its dtype did and it lacks the rules that cure it."""
        if self.rejection_of(policy) is not None:
            return True
        judged = self.is_exempt(policy) or self.known(policy) is not None
        cured = judged or any(rule.is_needed for rule in policy.fp32_modules)
        return not cured and self.rejection_of(policy.recipe) is not None

    def bar(self, policy: Policy, *, is_outside: bool) -> str | None:
        """Returns why a policy cannot win, which may be outside the space; None if it can."""
        if self.bars(policy):
            return "not as good as FP32"
        return "outside the space: it was measured for comparison" if is_outside else None

    def passes(self, policy: Policy) -> bool:
        """Returns whether the policy is exempt or passed; a compiled one may have passed without its graph."""
        known = self.known(policy)
        return self.is_exempt(without_graph(policy)) if known is None else known.passes or self.is_exempt(policy)

    def _of_graph(self, policy: Policy) -> list[Judgement | Unjudged]:
        """Returns what was found of a policy's own graph, then of others in its dtype, the latest first."""
        if policy.compile == "off":
            return []
        own = numerics_of(policy)
        alike = [one for one in reversed(self.found) if _is_graph_in(own, one)]
        return [self.found[one] for one in sorted(alike, key=lambda one: one != own)]


def _is_graph_in(policy: Policy, other: Policy) -> bool:
    """Returns whether another policy is compiled too, and in the dtype of this one."""
    is_alike = other.precision == policy.precision and other.float8_modules == policy.float8_modules
    return other.compile != "off" and is_alike
