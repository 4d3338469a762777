"""Rules that all rules of lint follow."""

import re
from pathlib import Path

import pytest

from distdiag.checks import load_checks
from distdiag.checks.base import sections
from distdiag.lint.rules import load_rules
from tests.checks.test_catalogue import SECTIONS

ROOT = Path(__file__).parents[2]
each_rule = pytest.mark.parametrize("rule", load_rules().values(), ids=lambda rule: rule.code)


@each_rule
def test_the_docstring_has_every_section(rule):
    assert list(sections(rule.__doc__)) == SECTIONS
    assert rule.code in sections(rule.__doc__)["When it is not a defect"]
    assert "https://" in sections(rule.__doc__)["References"]


@each_rule
def test_code_name_class_file_and_test_agree(rule):
    stem = rule.name.replace("-", "_")
    assert re.fullmatch(r"[A-Z]{3}\d{3}", rule.code)
    assert rule.__name__ == "".join(word.title() for word in rule.name.split("-"))
    assert rule.__module__ == f"distdiag.lint.rules.{stem}"
    assert (ROOT / "tests" / "lint" / "rules" / f"test_{stem}.py").exists()


@each_rule
def test_a_code_means_the_same_as_at_run_time(rule):
    checks = {check.code: check.name for check in load_checks().values()}
    assert checks.get(rule.code, rule.name) == rule.name
    assert (rule.name in checks.values()) == (rule.code in checks)


@each_rule
def test_the_page_about_lint_has_the_rule(rule):
    assert f"| {rule.code} | {rule.name} |" in (ROOT / "docs" / "lint.md").read_text()
