"""The file that holds what torch.compile made of a policy: a line of JSON that says what it fits, then bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amptune.policy.serialization import policy_to_dict

if TYPE_CHECKING:
    from amptune.policy.settings import Policy

__all__ = ["ArtifactFile", "beside", "digest_of", "is_artifact_file", "kept_in"]

_SCHEMA = "amptune.artifacts/1"
_START = f'{{"schema": "{_SCHEMA}"'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFile:
    """The compiler's artifacts, and the facts that they fit, by name: versions, the device, the policy's settings.

    `graphs` is what `torch.compiler.save_cache_artifacts` returns; reading it there unpickles it. `objects` are shared
    objects of compiled C++, by their path in torch.compile's cache folder.
    """

    fits: Mapping[str, str]
    graphs: bytes
    objects: Mapping[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Returns the file's bytes; `from_bytes` reverses it."""
        sizes = {name: len(data) for name, data in self.objects.items()}
        content = b"".join([*self.objects.values(), self.graphs])
        digest = _sha256(dict(self.fits), sizes, content)
        head = {"schema": _SCHEMA, "sha256": digest, "fits": dict(self.fits), "sizes": sizes}
        return json.dumps(head).encode() + b"\n" + content

    @staticmethod
    def from_bytes(data: bytes) -> ArtifactFile:
        """Reads a file's bytes, without unpickling them. Raises `ValueError` if they are damaged, or no such file."""
        first, _, content = data.partition(b"\n")
        if not first.startswith(_START):
            raise ValueError("is no file of amptune's artifacts")
        try:
            head = json.loads(first)
            fits, sizes = dict(head["fits"]), dict(head["sizes"])
            is_whole = head["sha256"] == _sha256(fits, sizes, content)
        except (LookupError, RecursionError, TypeError, ValueError):
            raise ValueError("is damaged") from None
        # the digest is no signature: who forges a head can give it one
        are_sizes = all(type(size) is int and size >= 0 for size in sizes.values())
        are_facts = all(isinstance(fact, str) for fact in fits.values())
        if not (is_whole and are_facts and are_sizes and sum(sizes.values()) <= len(content)):
            raise ValueError("is damaged")
        objects, begin = {}, 0
        for name, size in sizes.items():
            objects[name], begin = content[begin : begin + size], begin + size
        return ArtifactFile(fits=fits, graphs=content[begin:], objects=objects)


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
    bare: dict[str, Any] = {
        name: tuple(replace(rule, reason=None) for rule in getattr(policy, name))
        for name in ("fp32_modules", "half_modules", "float8_modules")
    }
    plain = policy_to_dict(replace(policy, batch_size=None, accumulate=1, **bare))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _sha256(fits: Any, sizes: Any, content: bytes) -> str:
    return hashlib.sha256(json.dumps([fits, sizes], sort_keys=True).encode() + b"\n" + content).hexdigest()
