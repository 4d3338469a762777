"""What a rule says about a place in a file."""

from __future__ import annotations

import msgspec

from distdiag.finding import Severity


class Related(msgspec.Struct, frozen=True):
    """Another place that belongs to a finding, with what is there. Lines count from 1."""

    path: str
    line: int
    message: str


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One place that is wrong. Lines and columns count from 1.

    Example: ``LintFinding(code="COL009", name="rank-guarded-collective", path="train.py", line=12,
    column=9, …)``.
    """

    code: str
    name: str
    severity: Severity
    message: str
    path: str
    line: int
    column: int
    end_line: int
    source: str = ""
    related: tuple[Related, ...] = ()
