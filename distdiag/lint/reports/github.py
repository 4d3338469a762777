"""Workflow commands, which GitHub shows beside the lines of a pull request."""

from __future__ import annotations

from typing import Final

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding
from distdiag.lint.linting import LintResult

_COMMANDS: Final = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "notice",
}


def github(result: LintResult) -> str:
    """Return one ``::error file=…,line=…,col=…,title=…::message`` for each finding.

    The format is GitHub's "Workflow commands for GitHub Actions".
    """
    return "".join(f"{_command(found)}\n" for found in result.findings)


def _command(found: LintFinding) -> str:
    values = {
        "file": found.path,
        "line": str(found.line),
        "endLine": str(found.end_line),
        "col": str(found.column),
        "title": f"{found.code} {found.name}",
    }
    properties = ",".join(f"{key}={_escaped(value, ',:')}" for key, value in values.items())
    return f"::{_COMMANDS[found.severity]} {properties}::{_escaped(found.message)}"


def _escaped(value: str, further: str = "") -> str:
    for sign in f"%\r\n{further}":
        value = value.replace(sign, f"%{ord(sign):02X}")
    return value
