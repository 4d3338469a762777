"""SARIF 2.1.0, the format of static analysis results that code hosts and editors read."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Final
from urllib.parse import quote

import msgspec

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Related
from distdiag.lint.linting import LintResult
from distdiag.lint.rules import load_rules

_LEVELS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(result: LintResult) -> str:
    """Return one SARIF log with one run."""
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "columnKind": "utf16CodeUnits",
                "invocations": [
                    {
                        "executionSuccessful": not result.not_checked,
                        "toolExecutionNotifications": [
                            {"level": "error", "message": {"text": problem}}
                            for problem in result.not_checked.values()
                        ],
                    }
                ],
                "results": [_result(found) for found in result.findings],
            }
        ],
    }
    return msgspec.json.format(msgspec.json.encode(log), indent=2).decode() + "\n"


def _driver() -> dict[str, object]:
    try:
        number = version("distdiag")
    except PackageNotFoundError:
        number = "0"
    return {
        "name": "distdiag",
        "version": number,
        "rules": [
            {
                "id": rule.code,
                "name": "".join(word.title() for word in rule.name.split("-")),
                "shortDescription": {"text": _documentation(rule).partition("\n")[0]},
                "help": {"text": _documentation(rule)},
                "defaultConfiguration": {"level": _LEVELS[rule.severity]},
            }
            for rule in load_rules().values()
        ],
    }


def _documentation(rule: type) -> str:
    return inspect.cleandoc(rule.__doc__ or "")


def _result(found: LintFinding) -> dict[str, object]:
    region = {"startLine": found.line, "startColumn": found.column, "endLine": found.end_line}
    return {
        "ruleId": found.code,
        "level": _LEVELS[found.severity],
        "message": {"text": found.message},
        "locations": [_location(found.path, region)],
        "relatedLocations": [_related(place) for place in found.related],
    }


def _related(place: Related) -> dict[str, object]:
    return _location(place.path, {"startLine": place.line}) | {"message": {"text": place.message}}


def _location(path: str, region: dict[str, int]) -> dict[str, object]:
    uri = quote(PurePath(path).as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
