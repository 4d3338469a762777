"""SARIF 2.1.0, the format of static analysis results that code hosts and editors read."""

import inspect
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final, Protocol
from urllib.parse import quote

from distdiag.findings.finding import Severity
from distdiag.record.visible import json_text, visible_lines
from distdiag.reports.base import tool_version

LEVELS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


class Documented(Protocol):
    """A check or a rule: its class has a code, a name, a severity and a page as its docstring."""

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]


def log(
    rules: Iterable[type[Documented]],
    results: Iterable[dict[str, Any]],
    problems: Iterable[str],
    *,
    is_successful: bool,
) -> str:
    """Return a log with one run; `problems` are what the tool could not look at."""
    document = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver(rules)},
                "columnKind": "utf16CodeUnits",
                "invocations": [
                    {
                        "executionSuccessful": is_successful,
                        "toolExecutionNotifications": [
                            {"level": "error", "message": {"text": text(problem)}}
                            for problem in problems
                        ],
                    }
                ],
                "results": list(results),
            }
        ],
    }
    return json_text(document, indent=2)


def _driver(rules: Iterable[type[Documented]]) -> dict[str, Any]:
    return {
        "name": "distdiag",
        "version": tool_version() or "0",
        "rules": [_rule(rule) for rule in rules],
    }


def _rule(rule: type[Documented]) -> dict[str, Any]:
    page = inspect.cleandoc(rule.__doc__ or "")
    return {
        "id": rule.code,
        "name": "".join(word.title() for word in rule.name.split("-")),
        "shortDescription": {"text": page.partition("\n")[0]},
        "help": {"text": page},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def location(path: str, region: dict[str, int]) -> dict[str, Any]:
    """Return a place in a file; a path that is not absolute is relative to the sources' root."""
    posix = PurePosixPath(path.encode("utf-8", "backslashreplace").decode())
    uri = posix.as_uri() if posix.is_absolute() else quote(str(posix))
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}


def text(value: str) -> str:
    """Return text in which nothing hides: of a surrogate pair, half is spelled out as well."""
    return visible_lines(value)
