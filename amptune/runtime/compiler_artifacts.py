"""Artifacts of torch.compile that a tuning left: loaded where they fit, so that training need not compile again."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amptune.errors import PolicyApplyError
from amptune.policy.artifact_file import ArtifactFile, beside, digest_of
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn

    from amptune.policy.policy_file import PolicyFile

__all__ = ["facts_of", "load_artifacts"]

# A path that stays within the cache folder.
_IN_CACHE = re.compile(r"([\w-]+/)+[\w.-]+\.so")


def load_artifacts(
    asked: bool | str | PathLike[str] | None, policy: Policy | PolicyFile, model: nn.Module
) -> tuple[Finding, ...]:
    """Gives torch.compile what it made of this policy before; returns a finding if that is missing or does not fit.

    `asked` is a path, or True for the file beside the policy's; the file is unpickled. Nothing happens for a policy
    that does not compile. Raises `PolicyApplyError` for True and a policy without a file.
    """
    settings = policy if isinstance(policy, Policy) else policy.policy
    if asked is None or asked is False or settings.compile == "off":
        return ()
    path = _beside(policy) if asked is True else Path(asked)
    why = _why_not(path, settings, model)
    if why is None:
        return ()
    message = f"{path} {why}: torch.compile compiles the model anew"
    return (Finding(code="artifacts-not-used", message=message, figures={"file": str(path)}),)


def facts_of(policy: Policy, device: torch.device | str) -> dict[str, str]:
    """Returns what artifacts depend on, of this policy on this device: they serve if all of it is equal."""
    kind = torch.device(device).type
    facts = {"torch": str(torch.__version__), "python": ".".join(platform.python_version_tuple()[:2])}
    if (triton := _triton()) is not None:
        facts["triton"] = triton
    return {**facts, "kind": kind, "device": _name_of(torch.device(device)), "settings": digest_of(policy)}


def _beside(policy: Policy | PolicyFile) -> Path:
    origin = "" if isinstance(policy, Policy) else policy.origin
    if not origin:
        raise PolicyApplyError(
            "artifacts=True means the file beside the policy's, and this policy comes from no file: give the "
            'artifacts by their path, artifacts="policy.yaml.artifacts"'
        )
    return beside(origin)


def _why_not(path: Path, settings: Policy, model: nn.Module) -> str | None:
    """Loads the file; returns why that cannot be done, or None."""
    try:
        found = ArtifactFile.from_bytes(path.read_bytes())
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except ValueError as error:
        return str(error)
    other = _differences(found.fits, facts_of(settings, _device_of(model, found.fits.get("kind", "cpu"))))
    if other:
        return f"does not fit ({other})"
    try:
        if torch.compiler.load_cache_artifacts(found.graphs) is None:
            return "cannot be loaded"
        _place(found.objects)
    except Exception as error:  # noqa: BLE001  # whatever it was, training can compile
        return f"cannot be loaded ({type(error).__name__}: {error})"
    return None


def _place(objects: Mapping[str, bytes]) -> None:
    """Writes shared objects into torch.compile's cache folder, where it looks for them before it compiles C++ anew."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # few trainings need this

    from amptune.policy.file_io import write_bytes

    for name, data in objects.items():
        path = Path(cache_dir(), name)
        if _IN_CACHE.fullmatch(name) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(data, path)


def _differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns in words what has changed since, with the policy's settings last."""
    names = [name for name in {**then, **now} if name not in ("kind", "settings")]
    versions = [
        f"{name} was {then.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in names
        if then.get(name) != now.get(name)
    ]
    other_policy = ["it is of a policy with other settings"] if then.get("settings") != now["settings"] else []
    return "; ".join((*versions, *other_policy))


def _device_of(model: nn.Module, kind: str) -> torch.device:
    """Returns the device of this kind that the model is on, or is likely to be moved to."""
    first = next(model.parameters(), None)
    if first is not None and first.device.type == kind:
        return first.device
    return torch.device("cuda" if kind == "cuda" else "cpu")


def _name_of(device: torch.device) -> str:
    """Returns the GPU's name and compute capability, or the CPU's name and vector instructions."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "no GPU"
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    from amptune.hardware.detect import read_cpu

    return f"{read_cpu().model}, {torch.backends.cpu.get_cpu_capability()}"


def _triton() -> str | None:
    """Returns the version of Triton; None if it is not installed, as for the CPU."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None
