"""The findings as one JSON document."""

from __future__ import annotations

import msgspec

from distdiag.lint.linting import LintResult


def json(result: LintResult) -> str:
    """Return ``{"schema_version": 1, "num_files": …, "findings": […], "not_checked": {…}}``."""
    document = {
        "schema_version": 1,
        "num_files": result.num_files,
        "findings": result.findings,
        "not_checked": result.not_checked,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
