"""Tests of the one report on a comparison and on the runs that were compared."""

from pathlib import Path

from distdiag.events.comparisons import Divergence, RoutingDifference, Subject
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Outcome, RankInfo, Report, Run, Severity
from distdiag.parity.report import Comparing, accepting, report_of

COMPARING = Comparing("parity", ("distdiag", "parity"), Path("runs/seven"), 0.0, 2)
RANKS = tuple(
    RankInfo(rank=rank, local_rank=rank, world_size=2, hostname="node", pid=7) for rank in range(2)
)


def finding(code, severity=Severity.ERROR):
    return Finding(
        code=code,
        name="n",
        severity=severity,
        grade=Grade.LIKELY,
        confidence=0.9,
        message="m",
        ranks=RankSet([0]),
        evidence=(),
    )


def own(*findings):
    run = Run(
        id="own",
        command=("train.py",),
        world_size=2,
        ranks=RANKS,
        torch="2.9",
        started="",
        ended=None,
        outcome=Outcome.FINISHED,
    )
    return Report(run=run, findings=findings, checked=("COL001", "HNG001"))


def test_what_was_found_in_the_runs_alone_is_in_the_report_once_and_nothing_about_the_agent():
    runs = [own(finding("COL001"), finding("DIA003")), own(finding("COL001"), finding("HNG001"))]
    report = report_of(COMPARING, [], Divergence, ranks_of=runs, findings_of=runs)
    assert [each.code for each in report.findings] == ["COL001", "HNG001"]
    assert {"COL001", "HNG001", "PAR010"} <= set(report.checked)
    assert (report.run.id, report.run.torch, report.run.ranks) == ("seven", "2.9", RANKS)
    assert report.run.active_modes == ("parity",)


def test_without_a_report_of_a_run_its_ranks_are_known_by_number():
    report = report_of(COMPARING, [], RoutingDifference)
    assert [rank.rank for rank in report.run.ranks] == [0, 1]
    assert (report.findings, report.checked) == ((), ("MOE014",))


def test_a_difference_is_found_by_the_check_of_its_kind_and_the_worst_finding_comes_first():
    divergence = Divergence(
        rank=0,
        seq=0,
        time_ns=0,
        step=0,
        subject=Subject.DATA,
        candidate="2 ranks",
        reference="1 rank",
        differences=(),
        num_compared=0,
        explanation="ranks 0 and 1 got the same samples",
        culprits=RankSet([0, 1]),
    )
    note = finding("COL001", Severity.INFO)
    report = report_of(COMPARING, [divergence], Divergence, findings_of=[own(note)])
    assert [each.code for each in report.findings] == ["PAR007", "COL001"]


def test_what_is_accepted_is_a_note_behind_the_others():
    report = accepting(own(finding("PAR017"), finding("PAR010")), ["PAR017"])
    other, accepted = report.findings
    assert (other.code, other.severity) == ("PAR010", Severity.ERROR)
    assert (accepted.code, accepted.severity, accepted.grade) == (
        "PAR017",
        Severity.INFO,
        Grade.NOTE,
    )
    assert "accepted as meant" in accepted.message
