"""The report that is kept while a run goes on, and the verdict at its end."""

import json

import msgspec
import pytest

from distdiag.config import Config
from distdiag.config.ignores import IgnoreRule
from distdiag.engine.rank_status import RankStatuses
from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.lifecycle import Finished, Raised, TorchLoaded
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Outcome, Severity
from distdiag.findings.report_json import decode_report
from distdiag.record.private_file import RESERVE_BYTES
from distdiag.record.run_dir import Launch, LaunchFile, RunDir, Verdict
from distdiag.reports.builder import RunReporter, crash_finding
from distdiag.views.rank_states import RankState, RankStatus, last_act

SITE = CallSite((Frame("torch/x.py", 1, "f", False), Frame("train.py", 41, "main")))
CALL = Collective(
    rank=0,
    seq=5,
    time_ns=0,
    step=3,
    group=ProcessGroup("0", "default_pg", (0, 1), "gloo"),
    collective_seq_id=12,
    signature=Signature("all_reduce"),
    site=SITE,
)


def finding(severity):
    return Finding(
        code="COL003",
        name="collective-shape-mismatch",
        severity=severity,
        grade=Grade.PROVEN,
        confidence=1.0,
        message="sizes differ",
        ranks=RankSet((1,)),
        evidence=(),
    )


def reporter_of(folder, *, first=0, local=2, world=2, attempt=0, **config):
    launch = Launch(
        rank=first,
        local_rank=0,
        world_size=world,
        local_world_size=local,
        attempt=attempt,
        max_attempts=1,
        parent_pid=1,
        identity="x",
        started_s=0.0,
    )
    run_dir = RunDir(folder, attempt)
    run_dir.folder.mkdir(exist_ok=True)
    launch_file = LaunchFile(launch=launch, command=("train.py",), config={}, cwd="/")
    return RunReporter(run_dir, launch_file, Config(**config), RankStatuses(launch.local_ranks))


def build(reporter, findings=(), states=None, **options):
    states = states if states is not None else {r: RankState(r) for r in reporter.rank_status.ranks}
    return reporter.build(findings, states, checks=("COL003", "HNG001"), not_checked={}, **options)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (RankState(0), ""),
        (
            RankState(0, status=RankStatus.RUNNING, phase=Phase.DATALOADER),
            "step 0, phase dataloader",
        ),
        (
            RankState(
                0,
                status=RankStatus.RUNNING,
                phase=Phase.BACKWARD,
                step=3,
                last_call=CALL,
                last_call_state="issued",
            ),
            "all_reduce #12 in default_pg at train.py:41 (issued), step 3, phase backward",
        ),
        (
            RankState(0, status=RankStatus.FINISHED, phase=Phase.FINISHED, exit_status=3),
            "finished with exit status 3; before that step 0, phase finished",
        ),
        (
            RankState(
                0,
                status=RankStatus.RAISED,
                step=2,
                raised=Raised(
                    rank=0,
                    seq=9,
                    time_ns=0,
                    type="ValueError",
                    message="no\nbatch",
                    frames=SITE.frames,
                    traceback="",
                ),
            ),
            "raised ValueError at train.py:41 in step 2: no batch",
        ),
    ],
)
def test_what_a_rank_did_last_is_one_sentence(state, expected):
    assert last_act(state) == expected


def test_a_check_that_did_not_look_is_not_said_to_have_checked(tmp_path):
    gap = {"COL003": "no collective was called"}
    report = reporter_of(tmp_path).build([], {}, checks=("COL003", "HNG001"), not_checked=gap)
    assert (report.checked, report.not_checked) == (("HNG001",), gap)


def test_ranks_of_other_nodes_and_incomplete_ranks_are_not_passed_over(tmp_path):
    reporter = reporter_of(tmp_path, world=8)
    reporter.feed(CALL)
    states = {0: RankState(0, incomplete="event-file: damaged"), 1: RankState(1)}
    report = build(reporter, states=states)
    assert report.not_checked == {
        "ranks 2-7": "not observed: they run on other nodes",
        "rank 0": "not observed wholly: event-file: damaged",
    }
    assert [info.rank for info in report.run.ranks] == [0, 1]


def test_ranks_that_nobody_told_of_at_the_start_are_silent_and_count(tmp_path):
    reporter = reporter_of(tmp_path, local=1, world=1)
    reporter.unobserved = RankSet((1, 2))
    report = build(reporter, states={0: RankState(0, status=RankStatus.FINISHED)})
    assert report.silent_ranks == RankSet((1, 2))
    assert report.run.world_size == 3
    assert report.not_checked["ranks 1-2"] == "not observed: no agent runs there"


def test_why_ranks_of_other_nodes_could_not_be_observed_is_reported(tmp_path):
    reporter = reporter_of(tmp_path, world=4)
    reporter.feed(CALL)
    reporter.problem = "nobody can listen"
    expected = "not observed: they run on other nodes, and nobody can listen"
    assert build(reporter).not_checked == {"ranks 2-3": expected}


@pytest.mark.parametrize(
    ("finished", "lost", "outcome"),
    [
        ((0,), (1,), Outcome.FINISHED),
        ((0,), (), Outcome.FAILED),
        ((), (0, 1), Outcome.FAILED),
        ((0, 1), (1,), Outcome.FINISHED),
    ],
)
def test_a_rank_that_is_lost_does_not_make_a_finished_run_a_failed_one(
    tmp_path, finished, lost, outcome
):
    reporter = reporter_of(tmp_path)
    for rank in finished:
        reporter.rank_status.feed(Finished(rank=rank, seq=1, time_ns=0, exit_status=0))
    reporter.lost = RankSet(lost)
    assert build(reporter, complete=True).run.outcome is outcome


def test_the_report_says_which_torch_and_how_the_run_ended(tmp_path):
    reporter = reporter_of(tmp_path)
    reporter.feed(TorchLoaded(rank=0, seq=0, time_ns=0, torch="2.13.0", tap="dispatcher"))
    assert build(reporter).run.outcome is Outcome.RUNNING
    assert build(reporter).run.ended is None
    for rank in (0, 1):
        reporter.rank_status.feed(Finished(rank=rank, seq=1, time_ns=0, exit_status=0))
    run = build(reporter, complete=True).run
    assert (run.torch, run.outcome, run.started) == (
        "2.13.0",
        Outcome.FINISHED,
        "1970-01-01T00:00:00.000+00:00",
    )
    assert run.ended is not None


@pytest.mark.parametrize(
    ("fail_on", "severity", "exit_status"),
    [
        ("error", Severity.ERROR, 1),
        ("error", Severity.WARNING, 0),
        ("warning", Severity.WARNING, 1),
        ("warning", Severity.INFO, 0),
        ("never", Severity.ERROR, 0),
    ],
)
def test_the_verdict_follows_the_worst_finding(tmp_path, fail_on, severity, exit_status):
    reporter = reporter_of(tmp_path, fail_on=fail_on)
    reporter.save_verdict([finding(severity)])
    verdict = msgspec.json.decode(
        (tmp_path / "attempt-0" / "verdict.json").read_bytes(), type=Verdict
    )
    assert verdict.exit_status == exit_status
    assert ("COL003" in verdict.summary) == bool(exit_status)


def test_a_form_that_cannot_be_made_costs_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "gone" / "summary"))
    reporter = reporter_of(tmp_path, report=("perfetto", "github", "junit", "markdown"))
    (tmp_path / "attempt-0").rmdir()
    reporter.show(build(reporter, [finding(Severity.WARNING)], complete=True))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("distdiag: --report perfetto: a trace needs a run directory")
    assert lines[1].startswith("::warning file=train.py,title=COL003")
    assert lines[2].startswith("distdiag: --report github: [Errno 2]")
    assert lines[3:] == [
        f"distdiag: junit report: {tmp_path}/report.junit.xml",
        f"distdiag: markdown report: {tmp_path}/report.md",
    ]
    assert "unwaited" not in (tmp_path / "report.md").read_text()


def test_the_last_line_tells_how_warnings_would_make_a_run_fail(tmp_path, capsys):
    reporter = reporter_of(tmp_path, report=("terminal",))
    for rank in (0, 1):
        reporter.rank_status.feed(Finished(rank=rank, seq=1, time_ns=0, exit_status=0))
    reporter.show(build(reporter, [finding(Severity.WARNING)], complete=True))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "distdiag: exit status 0 in spite of 1 warning; --fail-on warning makes it 1."


def test_ignored_findings_are_not_in_the_verdict(tmp_path):
    rule = IgnoreRule(codes=("COL",), reason="so")
    reporter = reporter_of(tmp_path, ignored=(rule,))
    reporter.save_verdict([finding(Severity.ERROR)])
    verdict = msgspec.json.decode(
        (tmp_path / "attempt-0" / "verdict.json").read_bytes(), type=Verdict
    )
    assert (verdict.exit_status, verdict.summary) == (0, "")
    report = build(reporter, [finding(Severity.ERROR)], complete=True)
    assert (report.findings, report.counts.ignored) == ((), 1)


def test_what_an_attempt_before_this_one_ignored_stays_ignored_once(tmp_path):
    rule = IgnoreRule(codes=("COL",), reason="so")
    first = reporter_of(tmp_path, ignored=(rule,))
    first.write(build(first, [finding(Severity.ERROR)]))
    second = reporter_of(tmp_path, attempt=1, ignored=(rule,))
    report = build(second, [finding(Severity.ERROR)])
    assert (report.findings, len(report.ignored)) == ((), 1)


def test_exit_statuses_are_left_by_rank(tmp_path):
    reporter = reporter_of(tmp_path)
    reporter.rank_status.feed(Finished(rank=1, seq=1, time_ns=0, exit_status=3))
    reporter.save_verdict([])
    assert json.loads((tmp_path / "attempt-0" / "exit-status.json").read_bytes()) == {"1": 3}


def test_room_is_set_aside_and_given_back(tmp_path):
    reporter = reporter_of(tmp_path)
    reserve = tmp_path / "report.reserve"
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    reporter.write(build(reporter))
    assert reserve.exists()
    reporter.release()
    assert not reserve.exists()


def test_a_damaged_report_of_an_earlier_attempt_does_not_stop_the_next(tmp_path):
    (tmp_path / "report.json").write_text("{")
    reporter = reporter_of(tmp_path, attempt=1)
    reporter.write(build(reporter))
    report = decode_report((tmp_path / "report.json").read_bytes())
    assert report.findings == ()
    assert report.run.attempts == 2


def test_a_failure_of_the_monitor_is_reported_with_its_traceback():
    try:
        raise KeyError("gone")
    except KeyError as error:
        reported = crash_finding(error)
    assert reported.severity is Severity.WARNING
    assert "KeyError" in reported.message
    assert "test_reporter.py" in str(reported.evidence[0].values["traceback"])
