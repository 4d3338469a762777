"""What two runs differ in, and in which order it is told."""

from pathlib import Path

import pytest

from distdiag.comparison import compare, facts_of
from distdiag.comparison.facts import ALL, RunFacts, arguments_of
from distdiag.comparison.text import json_of, text_of
from distdiag.events.environment import FactKind
from distdiag.events.errors import DamagedFileError, UsageError

NAMES = ("a", "b")


def run(*facts, traces=(), texts=()):
    found = RunFacts(Path("run"))
    for kind, name, value, *rank in facts:
        found.put(kind, name, value, rank[0] if rank else ALL)
    for name, step, rank, value in traces:
        found.trace(name, step, rank, value)
    found.texts.update(texts)
    return found


def test_what_somebody_changed_comes_before_what_follows_of_it():
    before = run(
        (FactKind.SEED, "torch", "0", 0),
        (FactKind.VARIABLE, "OTHER", "digest 1", 0),
        ("argument", "--lr", "1"),
        traces=[("weights of Net", -1, 0, "x")],
    )
    after = run(
        (FactKind.SEED, "torch", "1", 0),
        (FactKind.VARIABLE, "OTHER", "digest 2", 0),
        ("argument", "--lr", "2"),
        traces=[("weights of Net", -1, 0, "y")],
    )
    names = [each.name for each in compare(before, after)]
    assert names == ["--lr", "torch", "weights of Net", "OTHER"]


def test_the_first_step_and_the_ranks_of_a_trace_are_told():
    before = run(traces=[("data", step, rank, "x") for step in range(4) for rank in (0, 1)])
    after = run(
        traces=[("data", s, r, "y" if (s, r) >= (2, 1) else "x") for s in range(4) for r in (0, 1)]
    )
    (found,) = compare(before, after)
    assert (found.step, tuple(found.ranks)) == (2, (1,))
    assert "data first differ at step 2 (rank 1)" in text_of((found,), NAMES, is_all=False)


def test_ranks_that_only_one_run_has_are_no_difference_of_their_own():
    before = run((FactKind.VARIABLE, "NCCL_ALGO", "Ring", 0))
    after = run(*((FactKind.VARIABLE, "NCCL_ALGO", "Ring", rank) for rank in (0, 1)))
    assert compare(before, after) == ()


def test_tensors_that_differ_alike_are_one_difference():
    before = run(*(("plan", f"Net {n}", "float32") for n in "abc"))
    after = run(*(("plan", f"Net {n}", "bfloat16") for n in "abc"))
    (found,) = compare(before, after)
    assert (found.name, found.details) == ("Net a", ("Net b", "Net c"))


def test_the_lines_of_the_source_that_differ_are_shown():
    texts = [{"text of the script": f"a = {number}\nb = 2\n"} for number in (1, 2)]
    runs = [run((FactKind.CODE, "text of the script", str(t)), texts=t) for t in texts]
    (found,) = compare(*runs)
    assert found.details == ("-a = 1", "+a = 2")


def test_a_report_alone_is_compared_by_what_it_holds():
    full = run((FactKind.LAUNCH, "number of ranks", "2"), (FactKind.SEED, "torch", "0", 0))
    assert [e.name for e in compare(full, run((FactKind.LAUNCH, "number of ranks", "4")))] == [
        "number of ranks"
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--lr 0.1 --fast data", {"--lr": "0.1", "--fast": "data"}),
        ("--lr=0.1 x -v", {"--lr": "0.1", "number 1": "x", "-v": "given"}),
        ("--shift -1 --fast --slow", {"--shift": "-1", "--fast": "given", "--slow": "given"}),
    ],
)
def test_arguments_are_compared_by_their_names(words, found):
    assert dict(arguments_of(words.split())) == found


def test_escapes_of_a_stranger_are_harmless():
    bad = "\x1b[31m\n\r"
    found = compare(run(("argument", bad, bad)), run(("argument", bad, "1")))
    text = text_of(found, NAMES, is_all=True)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\x1b" not in json_of(found, NAMES)


def test_what_is_no_run_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        facts_of(tmp_path / "nothing")
    with pytest.raises(UsageError, match="there is no run"):
        facts_of(tmp_path)
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(DamagedFileError, match="neither a report"):
        facts_of(tmp_path / "x.json")
