"""Rules that the whole catalogue follows."""

import re
from pathlib import Path

import pytest

from distdiag.checks import load_checks
from distdiag.checks.base import sections
from distdiag.lint.rules import load_rules
from distdiag.views.models import (
    GradientReplicas,
    RouterBiasReplicas,
    StartReplicas,
    StepReplicas,
)

ROOT = Path(__file__).parents[2]
CHECKS = [check for check in load_checks().values() if check.__module__.startswith("distdiag.")]
SECTIONS = ["What you see", "Example", "How to fix", "When it is not a defect", "References"]

each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)


@each_check
def test_the_docstring_has_every_section(check):
    assert list(sections(check.__doc__)) == SECTIONS


@each_check
def test_code_name_class_file_and_test_agree(check):
    stem = check.name.replace("-", "_")
    assert re.fullmatch(r"[A-Z]{3}\d{3}", check.code)
    assert check.__name__ == "".join(word.title() for word in check.name.split("-"))
    family = check.code[:3].lower()
    assert check.__module__ == f"distdiag.checks.{family}.{stem}"
    tests = (ROOT / "tests" / "checks" / family).glob("test_*.py")
    wanted = re.compile(rf"\b({check.__name__}|{check.code})\b")
    assert any(wanted.search(test.read_text()) for test in tests)


@each_check
def test_a_check_is_shown_something(check):
    assert check.views
    assert check.check.__module__.startswith("distdiag.checks.")
    assert check.check.__module__ != "distdiag.checks.base"


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


@pytest.mark.parametrize(
    ("moment", "codes"),
    [
        (StartReplicas, ["REP001", "REP002", "SHD003"]),
        (GradientReplicas, ["SHD003", "SHD004", "SHD019"]),
        (StepReplicas, ["REP001", "REP003"]),
        (RouterBiasReplicas, ["MOE013"]),
    ],
)
def test_copies_that_differ_are_left_to_the_checks_of_that_moment(moment, codes):
    assert [check.code for check in CHECKS if moment in check.views] == codes
