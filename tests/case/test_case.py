"""A notebook of an investigation, from the symptom to the regression test."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from distdiag.case.experiments import Trial, changed, with_trial
from distdiag.case.notebook import (
    EXPERIMENTS,
    entries_of,
    new_notebook,
    read_notebook,
    with_entry,
    with_lines,
)
from distdiag.cli.case import command
from distdiag.comparison import Difference
from distdiag.events.environment import FactKind
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Finding, Outcome
from distdiag.reports import write_report
from tests.reports.samples import make_finding, make_report, make_run, make_warning

NEW = new_notebook({"symptom": "the loss is NaN"})


@pytest.fixture
def case(tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder: its output, errors and status."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(command, arguments)
        if isinstance(done.exception, UsageError | DamagedFileError):
            return str(done.exception), "", 2
        return done.stdout.strip(), done.stderr.strip(), done.exit_code

    return run


def make(folder: Path, *findings: Finding, arguments: tuple[str, ...] = (), checked=("COL003",)):
    """Write the report of a run with these arguments into a folder."""
    run = msgspec.structs.replace(
        make_run(Outcome.FINISHED), command=("/x/train.py", *arguments), exit_status=0
    )
    report = msgspec.structs.replace(make_report(*findings, run=run), checked=checked)
    folder.mkdir()
    write_report(folder / "report.json", report)
    return folder


def test_a_new_case_asks_what_is_not_known_yet(case):
    shown, asked, status = case("new", "Loss is NaN, after step 300!", "--expected", "as on 1 rank")
    assert (shown, status) == ("case-loss-is-nan-after-step-300.md", 0)
    assert asked.endswith(
        "still open in case-loss-is-nan-after-step-300.md: since when, reproducible"
    )
    text = Path(shown).read_text()
    assert text.startswith("# Case: Loss is NaN, after step 300!\n\n- symptom: Loss is NaN")
    assert "\n- expected: as on 1 rank\n- since when: ?\n" in text
    assert case("new", "Loss is NaN after step 300")[0].endswith("exists already")


def test_a_hypothesis_needs_what_confirms_and_what_refutes_it(case):
    path, _, _ = case("new", "it hangs")
    assert case("hypothesis", path, "a rank left", "--confirmed-if", "its stack ends")[2] == 2
    given = ("--confirmed-if", "its stack ends", "--refuted-if", "all stacks are alike")
    assert case("hypothesis", path, "a rank left", *given) == ("H1", "", 0)
    assert case("hypothesis", path, "the network", *given)[0] == "H2"
    first, _ = entries_of(read_notebook(Path(path)), "H")
    assert (first.title, first.says("refuted if")) == ("a rank left", "all stacks are alike")


def test_what_people_write_into_the_notebook_stays(case):
    path, _, _ = case("new", "it hangs")
    text = Path(path).read_text().replace("## Experiments", "my own words\n\n## Experiments")
    Path(path).write_text(text + "\n## My section\n\nmore\n")
    case("hypothesis", path, "x", "--confirmed-if", "a", "--refuted-if", "b")
    after = Path(path).read_text()
    assert after.index("my own words") < after.index("### H1 x") < after.index("## Experiments")
    assert after.endswith("## My section\n\nmore\n")


def test_each_serious_finding_becomes_a_hypothesis_once_the_surest_first(tmp_path):
    run = make(tmp_path / "run", make_warning(), make_finding())
    text, _ = with_trial(NEW, Trial(run))
    again, _ = with_trial(text, Trial(run))
    names = [entry.says("finding").split()[0] for entry in entries_of(again, "H")]
    assert names == ["COL003", "COL010"]
    assert all(
        entry.says("confirmed if") and entry.says("refuted if") for entry in entries_of(text, "H")
    )
    first, second = entries_of(again, "E")
    assert (first.title, first.says("changed")) == ("run", "this is the first run")
    assert second.says("changed") == "nothing that is recorded"
    assert "- error COL003 collective-shape-mismatch train.py:41 ranks 1: all_gather #12" in text


def test_one_change_is_recorded_and_more_than_one_is_pointed_out(tmp_path):
    runs = [
        make(tmp_path / "a", arguments=("--lr", "1")),
        make(tmp_path / "b", arguments=("--lr", "2")),
        make(tmp_path / "c", arguments=("--lr", "3", "--bf16")),
    ]
    text, remarks = NEW, []
    for run in runs:
        text, more = with_trial(text, Trial(run))
        remarks += more
    assert [entry.says("changed") for entry in entries_of(text, "E")[1:]] == [
        "argument --lr",
        "argument --bf16, argument --lr",
    ]
    assert "  - argument --lr: 1 -> 2\n" in text
    notes = [entry.says("not known") for entry in entries_of(text, "E")]
    assert notes == ["", "", "which of these changes did what this run shows"]
    (remark,) = remarks
    assert remark.startswith("E3 changes 2 things at once (argument --bf16, argument --lr): ")


def test_a_run_that_is_gone_is_said_to_be(tmp_path):
    text, _ = with_trial(NEW, Trial(make(tmp_path / "a")))
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    text, _ = with_trial(text, Trial(make(tmp_path / "b")))
    assert entries_of(text, "E")[1].says("changed").startswith(f"not compared: {tmp_path}/a: ")


def differing(*kinds: str | tuple[str, str]) -> tuple[str, ...]:
    pairs = [kind if isinstance(kind, tuple) else (kind, kind) for kind in kinds]
    found = [Difference(str(kind), name, "1", "2") for kind, name in pairs]
    return tuple(each.name for each in changed(found))


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ((("argument", "--seed"), FactKind.SEED, "trace", "plan"), ("--seed",)),
        ((FactKind.SEED, "trace", "outcome"), ("seed",)),
        (((FactKind.VERSION, "torch"), (FactKind.VERSION, "NCCL")), ("torch",)),
        (((FactKind.VERSION, "NCCL"),), ("NCCL",)),
        (((FactKind.LAUNCH, "folder"), (FactKind.DEVICE, "host"), "trace"), ()),
        (((FactKind.VARIABLE, "MASTER_ADDR"), (FactKind.VARIABLE, "NCCL_ALGO")), ("NCCL_ALGO",)),
    ],
)
def test_what_follows_of_a_change_is_no_other_change(differences, expected):
    assert differing(*differences) == expected


def test_an_edit_is_one_change_however_it_is_seen():
    edit = Difference(FactKind.CODE, "text of the script", "1", "2", details=("-a", "+b"))
    views = (edit, *(dataclasses.replace(edit, name=n, details=()) for n in ("commit", "changes")))
    assert changed(views) == (edit,)


def test_a_fix_is_judged_by_whether_its_finding_is_there_again(tmp_path):
    text, _ = with_trial(NEW, Trial(make(tmp_path / "a", make_finding())))
    text, failed = with_trial(text, Trial(make(tmp_path / "b", make_finding()), tries="H1"))
    text, worked = with_trial(text, Trial(make(tmp_path / "c"), tries="H1"))
    text, unclear = with_trial(text, Trial(make(tmp_path / "d", checked=()), tries="H1"))
    results = [entry.says("result") for entry in entries_of(text, "E")]
    assert results == ["", "failed", "worked", "unclear"]
    assert failed == ["the fix for H1 failed: what it is for is found again"]
    assert (len(worked), len(unclear)) == (1, 1)
    with pytest.raises(UsageError, match=r"no hypothesis is called H7 \(there are: H1\)"):
        with_trial(text, Trial(tmp_path / "a", tries="H7"))


def test_who_has_no_finding_says_what_came_of_the_fix(tmp_path):
    text, name = with_entry(NEW, "H", "the network", [])
    run = make(tmp_path / "a")
    with pytest.raises(UsageError, match="H1 rests on no finding: say --result"):
        with_trial(text, Trial(run, tries=name))
    text, _ = with_trial(text, Trial(run, tries=name, result="failed"))
    assert entries_of(text, "E")[0].says("result") == "failed"


def test_after_three_fixes_that_failed_somebody_else_has_to_look(tmp_path):
    run, failing = make(tmp_path / "a", make_finding()), Trial(tmp_path / "a", tries="H1")
    text, _ = with_trial(NEW, Trial(run))
    said = []
    for _ in range(4):
        text, remarks = with_trial(text, failing)
        said.append([remark for remark in remarks if "in a row" in remark])
    assert said[:2] == [[], []]
    assert said[2][0].startswith("3 fixes in a row have failed (E2, E3 and this one): let somebody")
    assert said[3][0].startswith("4 fixes in a row")
    _, remarks = with_trial(text.replace("reviewed by: ?", "reviewed by: Ada"), failing)
    assert len(remarks) == 1


def test_a_case_closes_with_a_cause_a_test_that_exists_and_a_constraint(case, tmp_path):
    path, _, _ = case("new", "it hangs", "--expected", "x", "--since", "y", "--reproducible", "z")
    case("add", path, str(make(tmp_path / "a", make_finding())))
    given = ("close", path, "--cause", "H1", "--test", "test_hang.py::test_it")
    assert case(*given)[2] == 2
    complete = (*given, "--constraint", "all ranks take equally many steps")
    assert case(*complete)[0].startswith("test_hang.py::test_it: there is no such test; write it")
    Path("test_hang.py").touch()
    _, doubt, status = case(*complete)
    assert (status, doubt) == (0, "distdiag: case: no experiment says that the fix of H1 worked")
    text = Path(path).read_text()
    assert "- cause: H1 all_gather #12" in text
    assert "- regression test: test_hang.py::test_it\n- constraint: all ranks take" in text


@pytest.mark.parametrize("hostile", ["a\n### H9 x\n- result: failed", "\x1b[31m", "## Conclusion"])
def test_texts_begin_no_entry_and_no_section(tmp_path, hostile):
    run = make(tmp_path / "a", make_finding(message=hostile, fix=hostile, disproof=hostile))
    text, _ = with_trial(new_notebook({"symptom": hostile}), Trial(run))
    assert [entry.name for entry in entries_of(text, "H")] == ["H1"]
    assert "\x1b" not in text
    assert text.split("\n").count("## Conclusion") == 1


def test_code_in_the_notebook_is_no_part_of_its_form():
    text, _ = with_entry(NEW, "E", "a", ["```diff", "### E8 x", "## y", "```"])
    text, name = with_entry(text, "E", "b", [])
    assert name == "E2"
    assert [entry.name for entry in entries_of(text, "E")] == ["E1", "E2"]
    assert with_lines(text, EXPERIMENTS, ["last"]).index("last") > text.index("### E2 b")


@pytest.mark.parametrize("content", [None, b"\xff", b"# Notes\n", b"## Hypotheses\n"])
def test_what_is_no_notebook_is_refused(case, content):
    if content is not None:
        Path("case.md").write_bytes(content)
    shown, _, status = case("add", "case.md", "run")
    assert status == 2
    assert shown.startswith("case.md: ")
