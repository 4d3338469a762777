"""One line for each finding, as compilers write it."""

from __future__ import annotations

from collections import Counter

from distdiag.findings.finding import Severity
from distdiag.lint.linting import LintResult


def text(result: LintResult) -> str:
    """Return the findings as ``path:line:column: CODE message``, then how many there are."""
    rows = [
        f"{found.path}:{found.line}:{found.column}: {found.code} "
        f"{'[info] ' if found.severity is Severity.INFO else ''}{found.message}"
        for found in result.findings
    ]
    return "\n".join([*rows, _summary(result)]) + "\n"


def _summary(result: LintResult) -> str:
    files = f"{result.num_files} file{'' if result.num_files == 1 else 's'}"
    if not result.findings:
        return f"nothing found in {files}"
    counts = Counter(found.severity for found in result.findings)
    counted = (f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in Severity if counts[s])
    return f"found {', '.join(counted)} in {files}".replace("infos", "info")
