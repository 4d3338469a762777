"""Comments that silence rules: ``# distdiag: ignore``, ``# distdiag: ignore[COL009, BAR001]``."""

from __future__ import annotations

import re
from typing import Final

from distdiag.lint.finding import LintFinding
from distdiag.lint.modules import Module

_COMMENT: Final = re.compile(r"#\s*distdiag:\s*ignore(?:\[(?P<codes>[^\]]*)\])?", re.IGNORECASE)


def is_ignored(module: Module, finding: LintFinding) -> bool:
    """Say whether a comment on a line of the finding's call or statement silences it."""
    return any(
        _silences(line, finding) for line in module.lines[finding.line - 1 : finding.end_line]
    )


def _silences(line: str, finding: LintFinding) -> bool:
    comment = _COMMENT.search(line)
    if comment is None:
        return False
    codes = comment["codes"]
    if codes is None:
        return True
    wanted = {code.strip().lower() for code in codes.split(",")}
    return bool(wanted & {finding.code.lower(), finding.name})
