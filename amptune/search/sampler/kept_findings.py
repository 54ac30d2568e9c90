"""Findings of a tuning run, kept with its study once the run has ended."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from amptune.policy.findings import Finding
from amptune.search.sampler.backend import opened, storage_errors

__all__ = ["findings_in", "keep_findings"]

# Prefix of the names of a study's attributes.
_FINDINGS = "findings"


def keep_findings(where: Path | str, run: str, findings: Iterable[Finding]) -> None:
    """Records what a tuning run noticed, in the study that knows the run. Raises `StudyError` if the storage fails."""
    told = [finding.as_dict() for finding in findings]
    with warnings.catch_warnings(), storage_errors():
        warnings.simplefilter("ignore")  # Optuna's journal is experimental
        storage = opened(where)
        for study in storage.get_all_studies():
            if any(name.endswith(f" {run}") for name in study.user_attrs):
                storage.set_study_user_attr(study._study_id, f"{_FINDINGS} {run}", told)


def findings_in(attributes: Mapping[str, Any], run: str) -> tuple[Finding, ...]:
    """Returns the findings of a run from its study's attributes; none if it was killed, or of an earlier amptune."""
    return tuple(map(Finding.from_dict, attributes.get(f"{_FINDINGS} {run}", ())))
