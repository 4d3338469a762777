"""The answer: causes, ideas, what to bring, and what was looked at."""

from __future__ import annotations

from typing import Literal

import msgspec

from distdiag.diagnosis.causes import Cause

Status = Literal["diagnosed", "inconclusive", "insufficient"]


class LookedAt(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact that was given, and what was made of it. `problem` is "" where all is well."""

    artifact: str
    source: str
    num_lines: int = 0
    used: tuple[str, ...] = ()
    problem: str = ""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact that was not given, and what it would show."""

    artifact: str
    why: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `distdiag diagnose` answers; docs/diagnose.md explains the fields.

    `root_causes` have a confidence of 0.5 and above, `possible` less. `left_out` says what could
    not be done, `warnings` what in the context was not understood.
    """

    schema_version: int = 1
    status: Status
    summary: str
    root_causes: tuple[Cause, ...] = ()
    possible: tuple[Cause, ...] = ()
    quick_fixes: tuple[str, ...] = ()
    missing_artifacts: tuple[Missing, ...] = ()
    analysis_artifacts: tuple[LookedAt, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
