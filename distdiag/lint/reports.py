"""How the findings of `distdiag lint` are shown."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Final
from urllib.parse import quote

import msgspec

from distdiag.findings.finding import Severity
from distdiag.lint.base import LintFinding, Related
from distdiag.lint.linting import LintResult
from distdiag.lint.rules import load_rules


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


def json(result: LintResult) -> str:
    """Return ``{"schema_version": 1, "num_files": …, "findings": […], "not_checked": {…}}``."""
    document = {
        "schema_version": 1,
        "num_files": result.num_files,
        "findings": result.findings,
        "not_checked": result.not_checked,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


# Workflow commands, which GitHub shows beside the lines of a pull request.

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


# SARIF 2.1.0, the format of static analysis results that code hosts and editors read.

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


FORMATS: Final[Mapping[str, Callable[[LintResult], str]]] = {
    "text": text,
    "json": json,
    "sarif": sarif,
    "github": github,
}
"""Each takes a result and returns what is printed, with its last newline; "" prints nothing."""
