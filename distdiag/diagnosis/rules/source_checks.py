"""What `distdiag lint` finds in the model's code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

from distdiag.config.selection import Selection
from distdiag.diagnosis.causes import SHOWN, Clue, Evidence, Issue
from distdiag.diagnosis.facts import Facts
from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding
from distdiag.lint.linting import lint_files
from distdiag.lint.rules import load_rules

_SECTION: Final = re.compile(r"## How to fix\n(.{1,600}?)(?:\n\n|\n##|$)", re.DOTALL)


def linted(facts: Facts) -> Iterator[Clue]:
    """Yield the findings of lint at warning or above."""
    documents = [code.document for code in facts.program.codes]
    if not documents:
        return
    result = lint_files([document.path for document in documents], Selection())
    for finding in result.findings:
        if finding.severity is Severity.INFO:
            continue
        document = next((d for d in documents if str(d.path) == finding.path), None)
        if document is not None:
            issue = Issue(
                id=finding.code,
                title=finding.message,
                severity=finding.severity,
                fix=_fix(finding),
            )
            evidence = Evidence(
                artifact=document.artifact,
                source=document.name,
                line=finding.line,
                quote=finding.source,
            )
            yield Clue(issue, SHOWN, (evidence,))


def _fix(finding: LintFinding) -> str:
    """Return the first paragraph of the rule's section on fixing."""
    match = _SECTION.search(inspect.getdoc(load_rules()[finding.code]) or "")
    return " ".join(match[1].split()) if match else f"See distdiag explain {finding.code}."


RULES: Final = (linted,)
