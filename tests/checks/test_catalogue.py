"""Rules that the whole catalogue follows."""

import re
from pathlib import Path

import pytest

from distdiag.checks import load_checks
from distdiag.findings.finding import Severity
from distdiag.lint.rules import load_rules

ROOT = Path(__file__).parents[2]
CHECKS = [check for check in load_checks().values() if check.__module__.startswith("distdiag.")]
SECTIONS = ["What it detects", "Why it matters", "Example", "How to fix", "References"]

each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)


@each_check
def test_the_docstring_has_every_section(check):
    assert re.findall(r"^ *## (.+)$", check.__doc__, re.M) == SECTIONS


@each_check
def test_code_name_class_file_and_test_agree(check):
    stem = check.name.replace("-", "_")
    assert re.fullmatch(r"[A-Z]{3}\d{3}", check.code)
    assert check.__name__ == "".join(word.title() for word in check.name.split("-"))
    family = check.code[:3].lower()
    assert check.__module__ == f"distdiag.checks.{family}.{stem}"
    assert (ROOT / "tests" / "checks" / family / f"test_{stem}.py").exists()


@each_check
def test_what_a_person_needs_is_written_down(check):
    for text in (check.why, check.fix, check.fix_changes, check.fix_leaves, check.disproof):
        assert len(text) > 20
        assert text.rstrip().endswith(".")


def test_the_docs_table_is_the_catalogue():
    rules = {code: rule for code, rule in load_rules().items() if code not in load_checks()}
    documented = sorted([*CHECKS, *rules.values()], key=lambda check: check.code)
    rows = re.findall(
        r"^\| ([A-Z]{3}\d{3}) \| (\S+) \| (.+?) \| ", (ROOT / "docs/checks.md").read_text(), re.M
    )
    assert rows == [(c.code, c.name, c.__doc__.splitlines()[0]) for c in documented]


def test_most_of_the_catalogue_can_fail_a_run():
    errors = [check.code for check in CHECKS if check.severity is Severity.ERROR]
    assert "COL001" in errors and "HNG001" in errors
