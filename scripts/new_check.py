#!/usr/bin/env python3
"""Scaffold a check: its source file, its test file and its row in docs/checks.md."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<code>[A-Z]{3}\d{3}) \| (?P<name>\S+) \|.*$", re.MULTILINE)

CHECK = '''"""{code}: SAY THE DEFECT IN ONE SENTENCE."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.views.alignment import Alignment
from distdiag.checks.base import Check
from distdiag.events.collectives import Collective
from distdiag.findings.finding import Finding, Severity


class {class_name}(Check):
    """Say the defect in one sentence.

    ## What it detects
    Say which records contradict which invariant.

    ## Why it matters
    Say what it does to the training run.

    ## Example
    Say in a line or two how user code gets there.

    ## How to fix
    Say what to change, and where.

    ## References
    - Name the function or the manual page that states the invariant.
    """

    code = "{code}"
    name = "{name}"
    severity = Severity.ERROR
    needs = (Collective,)

    why = "the mechanism, in one sentence"
    fix = "what to change, in one sentence"
    disproof = "the observation that would prove a finding wrong"

    def check_alignment(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        """Say what is compared."""
        yield from ()
'''

TEST = """from __future__ import annotations

import pytest

from distdiag.checks.{stem} import {class_name}


def test_{stem}_names_the_culprit():
    pytest.fail(f"{{{class_name}.code}} needs a stream that has the defect")


def test_a_healthy_stream_is_silent():
    pytest.fail(f"{{{class_name}.code}} needs the nearest stream that is correct")
"""


def rows_with(table: str, code: str, name: str, since: str) -> str:
    """Return docs/checks.md with a row for the new check, in the order of codes."""
    row = f"| {code} | {name} | Say the defect in one sentence. | {since} |"
    for match in ROW.finditer(table):
        if match["code"] > code:
            return f"{table[: match.start()]}{row}\n{table[match.start() :]}"
    return f"{table.rstrip()}\n{row}\n"


def problem_with(code: str, name: str, table: str, root: Path) -> str | None:
    """Return in one line why this code or name cannot be taken, or None."""
    if not re.fullmatch(r"[A-Z]{3}\d{3}", code):
        return f"code {code!r} is not three capital letters and three digits, like COL013"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return f"name {name!r} is not the defect in kebab-case, like collective-shape-mismatch"
    for match in ROW.finditer(table):
        if match["code"] == code:
            return f"code {code} is taken by {match['name']}; a code never changes its meaning"
        if match["name"] == name:
            return f"name {name} is taken by {match['code']}"
    stem = name.replace("-", "_")
    paths = [f"distdiag/checks/{stem}.py", f"tests/checks/test_{stem}.py"]
    return next((f"{path} exists already" for path in paths if (root / path).exists()), None)


def scaffold(code: str, name: str, root: Path) -> list[Path]:
    """Write the three files and return their paths."""
    stem = name.replace("-", "_")
    texts = {"code": code, "name": name, "stem": stem, "class_name": name.title().replace("-", "")}
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    docs = root / "docs" / "checks.md"
    contents = {
        root / "distdiag" / "checks" / f"{stem}.py": CHECK.format(**texts),
        root / "tests" / "checks" / f"test_{stem}.py": TEST.format(**texts),
        docs: rows_with(docs.read_text(), code, name, version.rpartition(".")[0]),
    }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(contents)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Scaffold the check that the command line names; exit status 2 if it cannot be."""
    parser = argparse.ArgumentParser(prog="new_check.py", description=__doc__)
    parser.add_argument("code", metavar="CODE", help="family and number, like COL013")
    parser.add_argument("name", help="the defect in kebab-case, like collective-shape-mismatch")
    options = parser.parse_args(arguments)
    table = (root / "docs" / "checks.md").read_text()
    problem = problem_with(options.code, options.name, table, root)
    if problem:
        print(f"new_check.py: {problem}", file=sys.stderr)
        return 2
    for path in scaffold(options.code, options.name, root):
        print(f"wrote {path.relative_to(root)}")
    print("next: write the check, its two streams and the row, then run scripts/test tests/checks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
