"""How reporters are found, and the one line of a finding."""

import pytest

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Location, Severity
from distdiag.record.visible import visible
from distdiag.reports import Reporter, load_reporter, one_line, reporter_names
from distdiag.reports.base import LONGEST_LINE, short


def finding(**changes):
    fields = {
        "code": "COL003",
        "name": "collective-shape-mismatch",
        "severity": Severity.ERROR,
        "grade": Grade.PROVEN,
        "confidence": 0.9,
        "message": "all_gather #12 has shape [3, 8] on rank 3 and [4, 8] on ranks 0-2",
        "ranks": RankSet({3}),
        "evidence": (),
        "location": Location("train.py", 41, "train_step", "dist.all_gather(out, x)"),
    }
    return Finding(**(fields | changes))


def test_each_module_is_the_reporter_that_its_name_says():
    assert {"json", "terminal"} <= set(reporter_names())
    for name in reporter_names():
        assert issubclass(load_reporter(name), Reporter)
        assert load_reporter(name).name == name


def test_the_one_line_says_what_where_and_who():
    assert one_line(finding()) == (
        "distdiag: error COL003 collective-shape-mismatch train.py:41 ranks 3: "
        "all_gather #12 has shape [3, 8] on rank 3 and [4, 8] on ranks 0-2"
    )


def test_the_one_line_leaves_out_what_is_not_known():
    line = one_line(finding(location=None, ranks=RankSet()))
    assert line.startswith("distdiag: error COL003 collective-shape-mismatch: all_gather #12")


@pytest.mark.parametrize(
    "changes",
    [
        {"message": "first\nsecond\x1b[2J\r\u202e" + "x" * 5000},
        {"location": Location("a\nb\x1b]0;.py", 1, "f")},
        {"ranks": RankSet(range(0, 1024, 2)), "message": "m"},
    ],
)
def test_the_one_line_stays_one_printable_line_of_bounded_length(changes):
    line = one_line(finding(**changes))
    assert line.isprintable()
    assert len(line) <= LONGEST_LINE


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 日本", "plain äöü 日本"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\tb\nc\r", r"a\tb\nc\r"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\ud800", r"\ud800"),
        ("\x9b31m", r"\x9b31m"),
    ],
)
def test_what_could_steer_a_terminal_is_spelled_out(text, shown):
    assert visible(text) == shown


def test_many_ranks_are_cut_after_a_whole_number_and_counted():
    assert short(RankSet(range(512))) == "0-511"
    assert short(RankSet({0, 1, 5})) == "0-1,5"
    assert short(RankSet(range(0, 512, 2)), length=12) == "0,2,4,6,8,… (256 ranks)"
