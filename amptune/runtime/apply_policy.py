"""Applies a policy to a model: checks everything, then changes the model in steps that can each be undone."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from typing import TYPE_CHECKING

from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.policy.settings import KNOBS, Policy
from amptune.runtime.batch_norm import FiniteStatistics
from amptune.runtime.claim_watch import ClaimWatch, claims_step
from amptune.runtime.class_swap import obstacle, overlaid, swap, swapped_class, unswap
from amptune.runtime.compiled_model import compiled
from amptune.runtime.compiler_artifacts import load_artifacts
from amptune.runtime.digest import model_digest
from amptune.runtime.module_precision import changes_of
from amptune.runtime.policy_argument import kind_of, read_policy
from amptune.runtime.ranks import Ranks, world_size
from amptune.runtime.tuned import Tuned
from amptune.runtime.way_back import WayBack
from amptune.runtime.weight_hook import PLAIN_WEIGHTS, WeightHook

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from amptune.policy.policy_file import PolicyFile
    from amptune.runtime.class_swap import Change
    from amptune.runtime.graphs.graphed_model import GraphedModel
    from amptune.runtime.graphs.whole_step import WholeStep
    from amptune.runtime.guard.guard import Guard
    from amptune.runtime.module_precision import Selected

__all__ = ["PolicyDriftWarning", "apply"]

_GUARD = "AMPTUNE_GUARD"

_under_a_policy: weakref.WeakKeyDictionary[nn.Module, Policy] = weakref.WeakKeyDictionary()


class PolicyDriftWarning(UserWarning):
    """A warning that a policy may not do what its file says: other software, another model, or unjudged numerics."""


def apply(
    policy: str | PathLike[str] | Policy | PolicyFile,
    model: nn.Module,
    *,
    any_hardware: bool = False,
    guard: bool | None = None,
    protect_batch_norm: bool = False,
    artifacts: bool | str | PathLike[str] | None = False,
) -> Tuned:
    """Applies a policy, a policy file or the fitting entry of a profile to the model, until `Tuned.undo`.

    `"apex:O0"` to `"apex:O3"` are the opt levels of NVIDIA's Apex as policies.
    Apply before building the optimizer, `torch.compile`, DistributedDataParallel and `fully_shard`.
    Raises `HardwareMismatchError` for a file that was tuned on another GPU, unless `any_hardware` or the
    environment's AMPTUNE_ANY_HARDWARE=1 allows it; `FileFormatError` for a malformed file; `PolicyApplyError`
    if the policy does not fit the model. The model is then unchanged. A bare `Policy` is not checked against the
    hardware. A `PolicyDriftWarning` tells of software versions other than those of the tuning, and of a policy that
    the numerics gate did not judge. In a distributed job `tuned.autocast()` raises `PolicyApplyError` if ranks applied
    different policies to one model; only their batch sizes may differ.

    If steps clearly take longer than the file's evidence says, there is one `PolicyDriftWarning`, after 200 of them.
    The loop's first 20 optimizer steps are watched too: there is a `PolicyMisuseWarning` for mistakes that harm
    training and raise nothing, and then the watch and its hooks go. `guard=False` watches nothing at all; where it is
    None, AMPTUNE_GUARD=0 in the environment says the same.
    `protect_batch_norm` keeps the running statistics of BatchNorm finite if a forward overflows in fp16: a value that
    is not finite is reset to its value at the last `tuned.scaler.update()`.
    `artifacts` is a file of what torch.compile made of this policy, or True for the one that `amptune tune` wrote
    beside it: the first step then finds it compiled. Loading unpickles, which can run any code: load only what you
    trust. If the file is missing, damaged or does not fit, there is a `PolicyDriftWarning`, and the model is compiled.
    """
    _require_plain(model)
    policy = read_policy(policy)
    settings, drift, claim = _read(policy, model, any_hardware=any_hardware)
    selected = changes_of(settings, model)
    _require_swappable(selected)
    if selected or settings.memory_format != "contiguous" or settings.cuda_graphs:
        _require_unsharded(model)
    weights = _weights(settings, model, selected)
    drift = (*drift, *load_artifacts(artifacts, policy, model), *_of_other_models(settings))
    for finding in drift:
        warnings.warn(str(finding), PolicyDriftWarning, stacklevel=2)
    findings = (*drift, *(finding for knob in KNOBS for finding in knob.idle(settings, model)))
    wish = os.environ.get(_GUARD, "") if guard is None else "1" if guard else "0"
    return _apply(
        settings,
        model,
        selected,
        weights,
        findings,
        watch=None if claim is None or wish == "0" else _watch(claim),
        guarded=wish != "0",
        protect_batch_norm=protect_batch_norm,
        origin="" if isinstance(policy, Policy) else policy.origin,
    )


def has_policy(model: nn.Module) -> bool:
    """Returns True while a policy is applied to the model, or to one that it is a copy of."""
    return model in _under_a_policy or bool(_patched(model))


def _patched(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if swapped_class(module) is not None]


def _require_plain(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyApplyError(f"a policy is applied to a torch.nn.Module, not to {kind_of(model)}")
    patched = _patched(model)
    if has_policy(model):
        where = f" ({patched[0] or 'the model itself'} runs under it)" if patched else ""
        raise PolicyApplyError(
            f"this {type(model).__name__} already has a policy{where}; undo that one first, with tuned.undo(); "
            "a copy has the policy of its original"
        )


def _read(
    policy: Policy | PolicyFile, model: nn.Module, *, any_hardware: bool
) -> tuple[Policy, tuple[Finding, ...], PolicyFile | None]:
    """Returns the settings, findings about what has changed since the tuning, and the file if it claims a step time."""
    if isinstance(policy, Policy):
        return policy, (), None
    found, claim = _validity(policy, model, any_hardware=any_hardware)
    return policy.policy, (*found, *_of_other_ranks(policy), *_not_judged(policy)), claim


def _validity(
    policy: PolicyFile, model: nn.Module, *, any_hardware: bool
) -> tuple[tuple[Finding, ...], PolicyFile | None]:
    """Returns the findings, and the file if its step time is of a machine like this: without labels nobody knows."""
    if not policy.valid_for:
        return (), None
    from amptune.hardware.detect import probe
    from amptune.policy.hardware_match import is_of_this_machine, require_valid

    hardware = probe(_gpu_of(model))
    labels, nvml = dict(hardware.labels), hardware.gpu is None or hardware.software.driver is not None
    if "model" in policy.valid_for:  # a lazy module has no shapes to compare yet
        is_lazy = any(map(nn.parameter.is_lazy, model.parameters()))
        labels["model"] = policy.valid_for["model"] if is_lazy else model_digest(model)
    found = require_valid(policy, labels, any_hardware=any_hardware, nvml=nvml)
    return found, policy if claims_step(policy) and is_of_this_machine(policy, labels, nvml=nvml) else None


def _of_other_ranks(policy_file: PolicyFile) -> Iterator[Finding]:
    """Yields a finding for a policy that was measured over another number of ranks than this job has."""
    tuned, here = policy_file.evidence.get("devices", 1), world_size()
    if tuned not in (1, here):
        message = f"this policy was measured on {tuned} devices that train together, and this job has {here}"
        figures = {"label": "devices", "tuned": tuned, "here": here}
        yield Finding(code="drift", message=f"{message}; its claim may not hold", figures=figures)


def _of_other_models(settings: Policy) -> Iterator[Finding]:
    """Yields a finding for each setting of the process that this policy changes under a model with another one."""
    changed = [knob for knob in KNOBS if knob.is_global]
    if any(knob.of(policy) != knob.of(settings) for policy in _under_a_policy.values() for knob in changed):
        gc.collect()  # models of before that nobody has any more, as a notebook leaves them
    for knob in changed:
        for other, policy in _under_a_policy.items():
            if knob.of(policy) != knob.of(settings):
                message = (
                    f"{knob.name} is set for the whole process: from now on it is {knob.of(settings)} for "
                    f"{type(other).__name__} too, whose policy says {knob.of(policy)}"
                )
                yield Finding(code="set-for-other-models", message=message)
                break


def _not_judged(policy_file: PolicyFile) -> Iterator[Finding]:
    """Yields a finding for a policy that the numerics gate did not judge."""
    evidence = policy_file.evidence
    if evidence.get("provisional"):
        for finding in evidence.get("findings", ()):
            if finding.get("code") == "not-judged":
                message = f"this policy is provisional: {finding.get('message')}"
                yield Finding(code="not-judged", message=message)


def _gpu_of(model: nn.Module) -> str | None:
    """Returns the model's GPU, or None: a model on the CPU is likely to be moved to the default GPU later."""
    first = next(model.parameters(), None)
    return str(first.device) if first is not None and first.device.type == "cuda" else None


def _require_swappable(selected: Sequence[tuple[Selected, Change]]) -> None:
    found = [(one, change, reason) for one, change in selected if (reason := obstacle(one.module, change)) is not None]
    reasons = [f"\n  {one} {reason}" for one, _, reason in found]
    if reasons:
        said = {"half": "run in half", "float8": "run in FP8", "recomputed": "checkpointed"}
        changes = " ".join(change for _, change, _ in found)
        where = next((words for change, words in said.items() if change in changes), "kept in FP32")
        raise PolicyApplyError(f"not every module can be {where}:{''.join(reasons)}")


def _require_unsharded(model: nn.Module) -> None:
    """Raises `PolicyApplyError` for FSDP2: FP32 modules would get weights gathered in half, and graphs stale memory."""
    for path, module in model.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):  # by name, to save the import
            where = path or "the model itself"
            raise PolicyApplyError(f"{where} is sharded by fully_shard already: apply the policy before that")


def _apply(
    settings: Policy,
    model: nn.Module,
    selected: Sequence[tuple[Selected, Change]],
    weights: WeightHook,
    findings: Sequence[Finding],
    *,
    watch: ClaimWatch | None,
    guarded: bool,
    protect_batch_norm: bool,
    origin: str,
) -> Tuned:
    with WayBack() as steps:
        _under_a_policy[model] = settings
        steps.add(_under_a_policy.pop, model, None)
        for knob in KNOBS:
            steps.add(knob.apply(knob.of(settings), model))
        for one, change in selected:
            swap(one.module, change)
            steps.add(unswap, one.module)
        steps.add(weights.undo)
        weights.convert()
        compiled_model = compiled(settings.compile, model, steps, in_place=bool(settings.cuda_graphs))
        graphed = _graphed(model, steps) if settings.cuda_graphs else None
        whole_step = _whole_step(graphed, steps) if graphed is not None and settings.cuda_graphs == "step" else None
        called = graphed or compiled_model
        guard = _guard(settings, model, called) if guarded else None

    def undo() -> None:
        _require_unswappable(selected)
        steps.go()

    statistics = FiniteStatistics(model) if protect_batch_norm and settings.scales_loss else None
    return Tuned(
        settings,
        model,
        model=called,
        findings=[*findings, *weights.findings()],
        undo=undo,
        guard=guard,
        claim_watch=watch,
        statistics=statistics,
        weights=weights,
        graphed=graphed,
        whole_step=whole_step,
        ranks=Ranks.of_this_job(settings, model, origin),
    )


def _weights(settings: Policy, model: nn.Module, selected: Sequence[tuple[Selected, Change]]) -> WeightHook:
    """Returns the hook for how the policy holds weights. Raises `PolicyApplyError` if the model cannot have them so."""
    if settings.weights != "half":
        return PLAIN_WEIGHTS
    from amptune.runtime.half.training import HalfTraining  # few policies need it, and importing it takes time

    return HalfTraining(settings, model, selected)


def _watch(claim: PolicyFile) -> ClaimWatch:
    # at the loop's own line, which entered `tuned.autocast()`
    return ClaimWatch(claim, lambda finding: warnings.warn(str(finding), PolicyDriftWarning, stacklevel=5))


def _guard(settings: Policy, model: nn.Module, called: nn.Module) -> Guard:
    from amptune.runtime.guard.guard import Guard  # what measures has none, and importing it takes time

    return Guard(settings, model, called)


def _graphed(model: nn.Module, steps: WayBack) -> GraphedModel:
    from amptune.runtime.graphs.graphed_model import GraphedModel  # few trainings have one, and importing it takes time

    graphed = GraphedModel(model, lambda finding: warnings.warn(str(finding), PolicyDriftWarning, stacklevel=2))
    steps.add(graphed.recordings.end)
    return graphed


def _whole_step(graphed: GraphedModel, steps: WayBack) -> WholeStep:
    from amptune.runtime.graphs.whole_step import WholeStep  # as above

    steps.add((whole_step := WholeStep(graphed.recordings)).end)
    return whole_step


def _require_unswappable(selected: Sequence[tuple[Selected, Change]]) -> None:
    in_the_way = [str(one) for one, _ in selected if overlaid(one.module)]
    if in_the_way:
        raise PolicyApplyError(
            f"the class of {', '.join(in_the_way)} was changed again after the policy was applied (parametrize "
            "and fully_shard do that): undo that first, then the policy"
        )
    hidden = [str(one) for one, _ in selected if "forward" in vars(one.module)]
    if hidden:
        raise PolicyApplyError(
            f"a forward was set on the instance of {', '.join(hidden)} after the policy was applied (accelerate's "
            "prepare() does that), which would go on running as the policy says: `del module.forward` first, then "
            "undo the policy"
        )
