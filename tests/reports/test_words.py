"""The sentences of a report: verdicts, headlines, paths."""

import pytest

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome, Report, Severity
from distdiag.reports.words import headline, shown_path, shown_text, verdict
from tests.reports.synthetic_run import make_finding, make_run


def report_of(*findings, outcome=Outcome.FINISHED, **changes):
    fields = {"complete": True, "run": make_run(2, outcome), "checked": ("COL001", "COL002")}
    return Report(findings=findings, **(fields | changes))


@pytest.mark.parametrize(
    ("report", "level", "text"),
    [
        (report_of(), "ok", "OK: 2 checks looked, nothing found; the run finished"),
        (
            report_of(outcome=Outcome.HUNG),
            "unknown",
            "2 checks looked, nothing found; the run hung",
        ),
        (report_of(checked=()), "unknown", "nothing was checked; the run finished"),
        (
            report_of(silent_ranks=RankSet({1})),
            "unknown",
            "2 checks looked, nothing found; the run finished",
        ),
        (
            report_of(make_finding(message="no data", severity=Severity.INFO)),
            "note",
            "1 note: no data (COL011); the run finished",
        ),
        (
            report_of(
                make_finding(message="it warns", severity=Severity.WARNING),
                make_finding(message="it fails"),
            ),
            "error",
            "1 error, 1 warning: it fails (COL011)",
        ),
        (
            report_of(make_finding(message="it fails"), outcome=Outcome.KILLED),
            "error",
            "1 error: it fails (COL011); the run was killed",
        ),
    ],
)
def test_the_verdict_is_one_sentence(report, level, text):
    assert verdict(report).level == level
    assert verdict(report).text == text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("rank 1 left: it is in barrier", "rank 1 left: it is in barrier"),
        (
            "rank 1 ran a loop more often than rank 0: all_reduce #3 at train.py:7 is call 5",
            "rank 1 ran a loop more often than rank 0",
        ),
        (
            "all_reduce #11 in group default_pg at train.py:10 is reached by rank 0 only, under x",
            "all_reduce #11 in group default_pg is reached by rank 0 only",
        ),
        ("a, 1 and b " + "is wrong " * 20, "a, 1 and b " + "is wrong " * 16 + "is …"),
    ],
)
def test_a_headline_says_what_and_leaves_out_the_rest(message, expected):
    assert headline(make_finding(message=message)) == f"{expected} (COL011)"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/me/src/train.py", "src/train.py"),
        ("/data/mean/train.py", "/data/mean/train.py"),
        ("/data/me/.venv/lib/site-packages/torch/x.py", "…/site-packages/torch/x.py"),
        ("/usr/lib/python3/dist-packages/torch/x.py", "…/dist-packages/torch/x.py"),
        ("train.py", "train.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_paths_are_shown_from_where_one_is(path, expected):
    assert shown_path(path, "/data/me") == expected


def test_paths_within_texts_are_shortened_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = f'File "{tmp_path}/a.py", line 3 (see {tmp_path}/b.py:7) 1/2 and/or https://x/y'
    assert shown_text(text) == 'File "a.py", line 3 (see b.py:7) 1/2 and/or https://x/y'
