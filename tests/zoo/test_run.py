"""Tests for judging runs and counting the judgements."""

import msgspec
import pytest

from tests.integration.launch import Outcome
from tests.zoo.expectation import ZooEntry, load_entries
from tests.zoo.run import (
    EntryResult,
    ScriptResult,
    combine,
    ending,
    main,
    names_mismatch,
    score_run,
    summarise,
)
from tests.zoo.score import Score

TRACEBACK = "[rank0]: Traceback (most recent call last):\n"
EXIT_ABORT = "terminate called without an active exception\n"


def ended(status: int | None, stderr: str = "") -> Outcome:
    return Outcome(exit_status=status, stdout="", stderr=stderr, duration_s=1.0, leftovers=())


FINISHED = ended(0)
HUNG = ended(None)
FAILED = ended(1)
NAMED = ended(1, "RuntimeError: Detected mismatch between collectives on ranks.")
SILENT_REPORT = {"findings": [], "complete": True}


@pytest.fixture
def entry() -> ZooEntry:
    """Return an entry that hangs on its own, by the fault of rank 0."""
    return load_entries(["simpletuner-262-ds-save-rank0"])[0]


def script_result(passed: bool) -> ScriptResult:
    return ScriptResult(
        outcome="finished",
        status=0,
        duration_s=1.0,
        score=Score(passed),
        aborted_at_exit=False,
        names_mismatch=False,
        left_behind=(),
        log_tail="",
        num_passed=int(passed),
    )


@pytest.mark.parametrize(
    ("name", "mode", "run", "passed"),
    [
        ("bug", "plain", HUNG, True),
        ("bug", "plain", FINISHED, False),
        ("bug", "plain", FAILED, False),
        ("fix", "plain", FINISHED, True),
        ("fix", "plain", HUNG, False),
        ("bug", "detail", HUNG, False),
        ("bug", "detail", NAMED, True),
        ("fix", "detail", FAILED, False),
        ("bug", "distdiag", HUNG, False),
        ("fix", "distdiag", FINISHED, False),
    ],
)
def test_a_run_without_a_report_is_judged_by_how_it_ended(entry, name, mode, run, passed):
    assert score_run(entry, name, mode, run).passed is passed


def test_a_report_that_names_the_right_rank_passes_the_bug(entry):
    finding = {"code": "COL009", "severity": "error", "ranks": [0]}
    report = {"findings": [finding], "complete": True}
    run = msgspec.structs.replace(FAILED, report=report)
    assert score_run(entry, "bug", "distdiag", run).passed


def test_a_fix_must_finish_and_its_report_must_be_silent(entry):
    silent = msgspec.structs.replace(FINISHED, report=SILENT_REPORT)
    assert score_run(entry, "fix", "distdiag", silent).passed
    failed = msgspec.structs.replace(FAILED, report=SILENT_REPORT)
    assert score_run(entry, "fix", "distdiag", failed).reason == "failed with status 1"


def test_a_process_left_behind_spoils_the_score(entry):
    run = msgspec.structs.replace(FINISHED, report=SILENT_REPORT, leftovers=("sleep 9",))
    assert score_run(entry, "fix", "distdiag", run).reason == "left behind: sleep 9"


def test_the_result_counts_hits_misses_and_false_alarms():
    results = [
        EntryResult(str(number), script_result(hit), script_result(silent))
        for number, (hit, silent) in enumerate([(True, True), (True, False), (False, True)])
    ]
    result = summarise("distdiag", results)
    assert (result.true_positives, result.misses, result.false_alarms) == (2, 1, 1)


def test_of_several_runs_one_that_does_not_pass_speaks_for_all():
    combined = combine([script_result(True), script_result(False), script_result(True)])
    assert not combined.score.passed
    assert (combined.num_passed, combined.num_runs) == (2, 3)
    assert " 2/3 " in combined.cell


def test_several_runs_that_pass_are_counted():
    combined = combine([script_result(True), script_result(True)])
    assert combined.score.passed
    assert (combined.num_passed, combined.num_runs) == (2, 2)


@pytest.mark.parametrize("times", ["0", "-3", "often"])
def test_a_script_runs_at_least_once(times, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--times", times])
    assert stopped.value.code == 2
    assert "--times" in capsys.readouterr().err


def test_an_unknown_entry_is_wrong_usage(capsys):
    assert main(["--only", "nobody-1"]) == 2
    assert "nobody-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "how"),
    [
        (FINISHED, "finished"),
        (ended(1, EXIT_ABORT), "finished"),
        (ended(1, EXIT_ABORT + TRACEBACK), "failed"),
        (HUNG, "hung"),
    ],
)
def test_an_abort_at_exit_is_reported_from_a_failure_of_the_script(run, how):
    assert ending(run) == how


def test_the_mismatch_that_torch_names_is_recognised():
    assert names_mismatch(NAMED)
    assert not names_mismatch(ended(1, "RuntimeError: Connection closed by peer"))
