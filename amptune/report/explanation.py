"""Explains a policy in sentences: the effect of each setting, and what was measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from amptune.errors import ClaimError, ObjectiveError
from amptune.policy.knobs.knob import Knob
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import in_one_line, policy_from_dict
from amptune.policy.settings import KNOBS, Policy
from amptune.search.claim import require_figures
from amptune.search.table.gains import FIGURES, gain_in_words
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import CONFIRMED, LIKELY, Ratio, chance_in_words

__all__ = ["explain", "machine_in_words"]

# Of the reasons why policies lost, the most that are told.
MOST_REASONS = 6
_SURE = {"confirmed": CONFIRMED, "likely": LIKELY}


def explain(policy_file: PolicyFile) -> Mapping[str, tuple[str, ...]]:
    """Returns sentences under headings: settings, what was measured, why others lost, risks, when to tune again.

    Raises `ClaimError` if the evidence is malformed.
    """
    policy, evidence = policy_file.policy, policy_file.evidence
    with _readable():
        require_figures(evidence)
        parts = {
            "Settings": (sentence for knob in KNOBS for sentence in knob.explained(policy)),
            "Measured": _evidence(evidence),
            "Why not another": _losers(evidence),
            "Risks": _risks(policy, evidence),
            "Where it holds": _validity(policy_file.valid_for, evidence),
        }
        return {heading: found for heading, sentences in parts.items() if (found := tuple(sentences))}


@contextmanager
def _readable() -> Iterator[None]:
    """Turns errors from hand-edited figures (a word for a number, a 0, a missing figure) into `ClaimError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, ObjectiveError, TypeError, ValueError) as error:
        raise ClaimError(f"evidence is not what `amptune tune` writes: {in_one_line(error)}") from error


def _evidence(evidence: Mapping[str, Any]) -> Iterator[str]:
    if not evidence:
        yield "Nothing: there is no evidence in this file, which was written by hand."
        return
    if "step_ms" in evidence:
        yield f"{evidence['step_ms']:g} ms a step, {evidence.get('samples_per_s', 0):g} samples/s."
    objective = Objective(evidence.get("objective", "throughput"), evidence.get("least_speed", 1.0))
    if "speedup" in evidence and not evidence.get("findings"):  # the first of which says it
        gain, speedup = _ratio(evidence, "gain" if "gain" in evidence else "speedup"), _ratio(evidence, "speedup")
        yield _sentence(gain_in_words(objective, gain, speedup))
    yield from _sureness(evidence)
    yield from (_bought(setting, figures, objective) for setting, figures in evidence.get("ablation", {}).items())
    recipe = evidence.get("amp_recipe")
    if recipe and "step_ms" in recipe:
        yield f"The AMP recipe took {recipe['step_ms']:g} ms a step."
    elif recipe and "failure" in recipe:
        yield "The AMP recipe failed."
    elif recipe:
        yield "The AMP recipe was so far behind that its trial ended early."
    yield from map(_finding, evidence.get("findings", ()))


def _sureness(evidence: Mapping[str, Any]) -> Iterator[str]:
    confidence, told = evidence.get("confidence"), {one.get("code") for one in evidence.get("findings", ())}
    if confidence in _SURE and "provisional" not in told:  # which says how sure
        yield f"{confidence.capitalize()}: with a probability of at least {chance_in_words(_SURE[confidence])}."
    elif confidence == "undecided" and "undecided" not in told:
        yield "Undecided: a policy may be better; more --budget, or a quieter machine, tells."
    if evidence.get("provisional") and "provisional" not in told:
        yield "Provisional: the answer is not confirmed, the numerics were not judged, or the search was cut short."


def _finding(finding: Mapping[str, Any]) -> str:
    module, message = finding.get("module"), finding.get("message", "")
    return f"{module}: {message}." if module else _sentence(message)


def _sentence(text: str) -> str:
    """Returns a text with a capital and a point, unless it begins with a name of PyTorch's."""
    first = text.partition(" ")[0].strip(",:")
    return f"{text if '_' in first or any(map(str.isdigit, first)) else text[:1].upper() + text[1:]}."


def _ratio(figures: Mapping[str, Any], name: str) -> Ratio:
    """Returns a ratio of the evidence, with its interval if there is one."""
    low, high = figures.get(f"{name}_ci95", (figures[name], figures[name]))
    return Ratio(value=figures[name], low=low, high=high)


def _bought(setting: str, figures: Mapping[str, Any], objective: Objective) -> str:
    """Returns what a setting buys beside the policy without it."""
    buys = _ratio(figures, "buys")
    if objective.name == "throughput":
        return f"{setting} makes it {buys} as fast as without."
    with_it = f"its {FIGURES[objective.name]} {buys.inverse}, and its speed {figures.get('speed', 1):g}×"
    return f"{setting} makes {with_it} that without."


def _losers(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yields why the other finalists did not win, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in evidence.get("finalists", ()):
        if one.get("lost"):
            reasons.setdefault(one["lost"], []).append(str(policy_from_dict(one["policy"])))
    for reason, lost in list(reasons.items())[:MOST_REASONS]:
        yield f"{'; '.join(lost)}: {reason}."


def _risks(policy: Policy, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yields what may go wrong under the policy."""
    yield from (knob.risks[value] for knob in KNOBS if (value := _plain_value(knob, policy)) in knob.risks)
    share = evidence.get("parity", {}).get("share_of_allowed")
    if share is not None:
        yield f"The numerics gate saw the first steps alone ({share:.0%} of its limits is used): watch your loss."


def _plain_value(knob: Knob, policy: Policy) -> Any:
    """Returns a setting's value, if it is one that may have a risk by itself."""
    value = knob.of(policy)
    return value if isinstance(value, str | bool) else None


def _validity(valid_for: Mapping[str, str], evidence: Mapping[str, Any]) -> Iterator[str]:
    if valid_for:
        yield f"Valid for {machine_in_words(valid_for)}."
    tuned_on = str(evidence.get("tuned_on", ""))[:10]
    if evidence and valid_for:
        since = f" Tuned on {tuned_on}." if tuned_on else ""
        yield f"Tune again for another GPU or CPU, release of PyTorch, model, shape of the data or batch size.{since}"


def machine_in_words(labels: Mapping[str, str]) -> str:
    """Returns the machine, software and model that labels name, as a list in words; unknown labels as they are."""
    rest = dict(labels)
    found = []
    product, mib = rest.pop("nvidia.com/gpu.product", None), rest.pop("nvidia.com/gpu.memory", "")
    major, minor = (rest.pop(f"nvidia.com/gpu.compute.{part}", None) for part in ("major", "minor"))
    if product is not None:
        size = f" with {int(mib) / 1024:.0f} GiB" if mib.isdecimal() else ""
        found.append(f"{product.replace('-', ' ')}{size}")
    if major is not None:
        found.append(f"compute capability {major}.{minor or 0}")
    if arch := rest.pop("kubernetes.io/arch", None):
        model = {name: rest.pop(f"{_CPU}model.{name}", None) for name in ("vendor_id", "family", "id")}
        known = " ".join(f"{_CPU_WORDS[name]}{value}" for name, value in model.items() if value)
        extensions = [name for name in list(rest) if name.startswith(f"{_CPU}cpuid.") and rest.pop(name)]
        has = f" with {', '.join(name.rpartition('.')[2] for name in extensions)}" if extensions else ""
        found.append(f"{arch} CPUs{f' of {known}' if known else ''}{has}")
    model_digest = rest.pop("model", None)
    found += [f"{_NAMES.get(name, name)} {value}" for name, value in rest.items()]
    return ", ".join([*found, *(["this model"] if model_digest else [])])


_CPU = "feature.node.kubernetes.io/cpu-"
_CPU_WORDS = {"vendor_id": "", "family": "family ", "id": "model "}
_NAMES = {"torch": "torch", "cudnn": "cuDNN"}
