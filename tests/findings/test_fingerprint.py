"""A finding of the next run is known again, and another one is not taken for it."""

import pytest

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Location
from distdiag.findings.fingerprint import NUM_DIGITS, fingerprint_of
from tests.reports.samples import HOSTILE, make_finding

LINE = "dist.all_reduce(x, op=ReduceOp.SUM)"


def at(source=LINE, file="/a/b/train.py", line=7, function="main", **changes):
    return make_finding(location=Location(file, line, function, source), **changes)


def test_it_has_the_same_length_always():
    assert len(fingerprint_of(at())) == len(fingerprint_of(make_finding(location=None)))
    assert len(fingerprint_of(at())) == NUM_DIGITS


@pytest.mark.parametrize(
    "other",
    [
        at(line=900),
        at(file="/home/x/train.py"),
        at(ranks=RankSet(range(8))),
        at(step=3),
        at(message="other words"),
        at(evidence=()),
        at(subjects=("default_pg", "default_pg")),
        at("  dist.all_reduce( x, op = ReduceOp.SUM )  # why"),
        at(f"{LINE}  # distdiag: ignore[COL003]"),
    ],
)
def test_ranks_lines_folders_comments_and_spaces_do_not_count(other):
    assert fingerprint_of(other) == fingerprint_of(at())


@pytest.mark.parametrize(
    "other",
    [
        at(code="COL004"),
        at("dist.all_reduce(y, op=ReduceOp.SUM)"),
        at('print("# a")'),
        at(function="evaluate"),
        at(subjects=("dp",)),
        make_finding(location=None),
    ],
)
def test_code_subject_function_and_line_do_count(other):
    assert fingerprint_of(other) != fingerprint_of(at())


def test_a_sign_in_a_string_is_no_comment():
    assert fingerprint_of(at('f("# a")')) != fingerprint_of(at('f("# b")'))


def test_the_folders_of_a_subject_do_not_count():
    paths = ("/tmp/pytest-1/out/model.pt", "out/model.pt"), ("/tmp/pytest-2/out/model.pt",)
    first = at(subjects=paths[0])
    assert fingerprint_of(first) == fingerprint_of(at(subjects=("/x/model.pt", "out/model.pt")))
    assert fingerprint_of(at(subjects=paths[1])) == fingerprint_of(at(subjects=("/y/model.pt",)))


@pytest.mark.parametrize("source", ["dist.all_reduce(x,", '"""open', "x = (", "\tif x:", "a b c ?"])
def test_half_of_a_statement_has_one_too(source):
    assert fingerprint_of(at(source)) == fingerprint_of(at(f"{source} "))
    assert fingerprint_of(at(source)) != fingerprint_of(at(f"z{source}"))


@pytest.mark.parametrize("text", [*HOSTILE, "x" * 10_000_000])
def test_any_text_has_one(text):
    found = at(text, function=text, subjects=(text,), code=text)
    assert len(fingerprint_of(found)) == NUM_DIGITS
