"""The file that holds what torch.compile made of a policy: a line of JSON that says what it fits, then bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amptune.policy.serialization import policy_to_dict

if TYPE_CHECKING:
    from amptune.policy.settings import Policy

__all__ = ["ArtifactFile", "beside", "digest_of", "is_artifact_file", "kept_in"]

_SCHEMA = "amptune.artifacts/1"
_START = f'{{"schema": "{_SCHEMA}"'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFile:
    """The compiler's artifacts, and the facts that they fit, by name: versions, the device, the policy's settings.

    `content` is what `torch.compiler.save_cache_artifacts` returns. Reading it there unpickles it.
    """

    fits: Mapping[str, str]
    content: bytes

    def to_bytes(self) -> bytes:
        """Returns the file's bytes; `from_bytes` reverses it."""
        head = {"schema": _SCHEMA, "sha256": _sha256(self.fits, self.content), "fits": dict(self.fits)}
        return json.dumps(head).encode() + b"\n" + self.content

    @staticmethod
    def from_bytes(data: bytes) -> ArtifactFile:
        """Reads a file's bytes, without unpickling them. Raises `ValueError` if they are damaged, or no such file."""
        first, _, content = data.partition(b"\n")
        head = json.loads(first) if first.startswith(_START) else {}
        fits = head.get("fits", {})
        if not isinstance(fits, dict) or head.get("sha256") != _sha256(fits, content):
            raise ValueError("is damaged" if head else "is no file of amptune's artifacts")
        return ArtifactFile(fits=fits, content=content)


def beside(policy: str | os.PathLike[str]) -> Path:
    """Returns the path of the artifacts that belong to a policy file: policy.yaml.artifacts for policy.yaml."""
    return Path(f"{os.fspath(policy)}.artifacts")


def is_artifact_file(path: Path) -> bool:
    """Returns True for a file that amptune wrote for artifacts, damaged or not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_START)) == _START


def kept_in(folder: Path, policy: Policy) -> Path:
    """Returns the path in a study's folder for a policy's artifacts; graphs of other batch sizes are others."""
    return folder / f"{digest_of(policy)[:16]}-batch-{policy.batch_size or 'own'}"


def digest_of(policy: Policy) -> str:
    """Returns a SHA-256 of the settings, without batch sizes and the reasons of rules: the compiler looks at shapes."""
    fp32 = tuple(replace(rule, reason=None) for rule in policy.fp32_modules)
    half = tuple(replace(rule, reason=None) for rule in policy.half_modules)
    plain = policy_to_dict(replace(policy, batch_size=None, accumulate=1, fp32_modules=fp32, half_modules=half))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _sha256(fits: Mapping[str, str], content: bytes) -> str:
    return hashlib.sha256(json.dumps(dict(fits), sort_keys=True).encode() + b"\n" + content).hexdigest()
