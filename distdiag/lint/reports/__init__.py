"""How the findings are shown: one module for each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from distdiag.lint.linting import LintResult
from distdiag.lint.reports.github import github
from distdiag.lint.reports.json import json
from distdiag.lint.reports.sarif import sarif
from distdiag.lint.reports.text import text

FORMATS: Final[Mapping[str, Callable[[LintResult], str]]] = {
    "text": text,
    "json": json,
    "sarif": sarif,
    "github": github,
}
"""Each takes a result and returns what is printed, with its last newline; "" prints nothing."""
