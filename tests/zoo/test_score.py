"""Tests for the scoring of reports against expectations."""

from pathlib import Path

import msgspec
import pytest

from tests.zoo.expectation import Expectation
from tests.zoo.score import (
    EvidenceSummary,
    FindingSummary,
    Location,
    Report,
    matches,
    score_bug,
    score_fix,
)

SCRIPT = Path("/zoo/entry/bug.py")
EXPECTATION = Expectation(
    source="owner/project#1",
    title="A rank leaves early",
    outcome="hang",
    families=("COL",),
    codes=("COL001",),
    ranks=(1,),
    lines=(40, 57),
    subjects=("head",),
)
ELSEWHERE = Location("/zoo/entry/bug.py", 3)


def finding(**changes) -> FindingSummary:
    fields = {"code": "COL002", "severity": "error", "ranks": (0,), "location": ELSEWHERE}
    return FindingSummary(**(fields | changes))


def report(*findings: FindingSummary, complete: bool = True) -> Report:
    return Report(findings, complete)


@pytest.mark.parametrize(
    ("changes", "matched"),
    [
        ({}, ()),
        ({"ranks": (1,)}, ("rank",)),
        ({"ranks": (0, 1)}, ()),
        ({"ranks": ()}, ()),
        ({"location": Location("/zoo/entry/bug.py", 57)}, ("line",)),
        ({"location": Location("bug.py", 57)}, ("line",)),
        ({"location": Location("/zoo/other/bug.py", 57)}, ()),
        ({"location": Location("/zoo/entry/model.py", 57)}, ()),
        ({"location": Location("/zoo/entry/bug.py")}, ()),
        ({"location": None}, ()),
        ({"subjects": ("trunk", "head")}, ("subject",)),
        ({"subjects": ("model.head",)}, ("subject",)),
        ({"subjects": ("overhead",)}, ()),
        ({"ranks": (1,), "subjects": ("head",)}, ("rank", "subject")),
        ({"code": "HNG001", "ranks": (1,)}, ()),
    ],
)
def test_a_finding_matches_by_rank_line_or_subject_within_its_family(changes, matched):
    assert matches(finding(**changes), EXPECTATION, SCRIPT) == matched


def test_both_ranks_are_right_where_the_expectation_cannot_tell_them_apart():
    symmetric = msgspec.structs.replace(EXPECTATION, ranks=(0, 1))
    assert matches(finding(ranks=(0, 1)), symmetric, SCRIPT) == ("rank",)


def test_in_a_tie_the_peer_may_be_named_beside_the_culprit_but_not_instead_of_it():
    tied = msgspec.structs.replace(EXPECTATION, tie=True)
    assert matches(finding(ranks=(0, 1)), tied, SCRIPT) == ("rank",)
    assert matches(finding(ranks=(1,)), tied, SCRIPT) == ("rank",)
    assert matches(finding(ranks=(0,)), tied, SCRIPT) == ()
    assert matches(finding(ranks=()), tied, SCRIPT) == ()


def test_a_hit_reports_the_finding_that_matched_most():
    weak = finding(code="COL001", ranks=(1,))
    strong = finding(code="COL009", ranks=(1,), subjects=("head",))
    score = score_bug(report(weak, strong), EXPECTATION, SCRIPT)
    assert (score.passed, score.code, score.matched) == (True, "COL009", ("rank", "subject"))


def shown_at(*lines: int) -> dict[str, object]:
    """Return what a finding has that stands at the first line and shows the others as evidence."""
    first, *others = [Location("/zoo/entry/bug.py", line) for line in lines]
    return {"location": first, "evidence": tuple(map(EvidenceSummary, others))}


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        (shown_at(40, 57), True),
        (shown_at(57, 41), True),
        (shown_at(57, 40, 3), True),
        (shown_at(40), False),
        (shown_at(40, 41), False),
        (shown_at(3, 40, 57), False),
        ({"location": None}, False),
        (shown_at(57) | {"evidence": (EvidenceSummary(Location("other.py", 40)),)}, False),
        (shown_at(57) | {"evidence": (EvidenceSummary(),)}, False),
    ],
)
def test_of_a_conflict_both_sides_must_be_shown(changes, passed):
    conflict = msgspec.structs.replace(EXPECTATION, evidence_lines=((40, 41), (57,)))
    assert score_bug(report(finding(ranks=(1,), **changes)), conflict, SCRIPT).passed is passed


def test_the_finding_that_shows_both_sides_is_reported_before_one_that_matches_otherwise():
    conflict = msgspec.structs.replace(EXPECTATION, evidence_lines=((40,), (57,)))
    otherwise = finding(ranks=(1,), subjects=("head",), location=Location("bug.py", 40))
    both = finding(code="COL009", **shown_at(40, 57))
    score = score_bug(report(otherwise, both), conflict, SCRIPT)
    assert (score.passed, score.code, score.matched) == (True, "COL009", ("line", "sides"))


def test_a_finding_of_severity_info_is_no_hit():
    score = score_bug(report(finding(ranks=(1,), severity="info")), EXPECTATION, SCRIPT)
    assert (score.passed, score.reason) == (False, "no finding of warning or above")


def test_a_warning_is_a_hit():
    assert score_bug(report(finding(ranks=(1,), severity="warning")), EXPECTATION, SCRIPT).passed


def test_a_miss_says_what_was_found_instead():
    score = score_bug(report(finding()), EXPECTATION, SCRIPT)
    assert not score.passed
    assert "COL002 ranks [0] bug.py:3" in score.reason


def test_a_hit_in_a_provisional_report_does_not_count():
    score = score_bug(report(finding(ranks=(1,)), complete=False), EXPECTATION, SCRIPT)
    assert (score.passed, score.reason) == (False, "the report is not complete")


def test_a_bug_without_a_report_is_a_miss_with_the_reason():
    score = score_bug(None, EXPECTATION, SCRIPT)
    assert (score.passed, score.reason) == (False, "there is no report")


def test_a_fix_may_have_findings_of_severity_info():
    assert score_fix(report(finding(severity="info"))).passed


@pytest.mark.parametrize("severity", ["warning", "error"])
def test_a_fix_that_is_accused_is_a_false_alarm(severity):
    score = score_fix(report(finding(severity=severity, code="DIA001", message="it broke")))
    assert (score.passed, score.code, score.reason) == (False, "DIA001", "it broke")


def test_a_fix_without_a_complete_report_fails():
    assert not score_fix(report(complete=False)).passed
    assert not score_fix(None).passed


def test_a_report_may_hold_more_than_the_score_needs():
    text = (
        '{"schema_version": 1, "complete": true, "findings": [{"code": "COL001", "severity": '
        '"error", "grade": "proven", "message": "m", "ranks": [1], "step": null, "location": '
        '{"file": "bug.py", "line": 4, "function": "main", "source": "x"}, "subjects": [], '
        '"evidence": [{"ranks": [1], "summary": "s", "location": null, "values": {}}]}]}'
    )
    found = finding(
        code="COL001",
        message="m",
        ranks=(1,),
        location=Location("bug.py", 4),
        evidence=(EvidenceSummary(),),
    )
    assert msgspec.json.decode(text, type=Report) == report(found)
