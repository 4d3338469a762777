"""What is judged when there are only stacks."""

from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Outcome, Severity
from distdiag.live.job_dump import jobs_of
from distdiag.live.report import report_of
from distdiag.views.rank_states import StackView
from tests.live.test_job_dump import node, stacks


class StandsInMain(Check[StackView]):
    """Name the ranks whose innermost frame is `main`."""

    code = "HNG999"
    name = "stands-in-main"
    severity = Severity.ERROR

    def check(self, view):
        ranks = RankSet(
            rank
            for rank, state in view.states.items()
            if state.stacks and state.stacks.threads[0].frames[0].function == "main"
        )
        yield self.finding("in main", ranks=ranks, evidence=(Evidence(ranks=ranks, summary="x"),))


def judged(*ranks):
    (job,) = jobs_of([node(*ranks)])
    return report_of(job)


def test_checks_that_need_more_than_stacks_say_nothing_and_are_listed():
    report = judged(stacks(0), stacks(1))
    able = {code for code, check in load_checks().items() if StackView in check.views}
    assert set(report.checked) == able
    assert report.not_checked.keys() == load_checks().keys() - able
    assert report.not_checked["COL001"] == "needs more than stacks"
    assert not [f for f in report.findings if f.code in report.not_checked]


def test_a_check_of_stacks_judges_all_ranks_that_were_found(monkeypatch):
    checks = {"HNG999": StandsInMain, "COL001": load_checks()["COL001"]}
    monkeypatch.setattr("distdiag.live.report.load_checks", lambda: checks)
    report = judged(stacks(0), stacks(2))
    ((finding,), checked) = report.findings, report.checked
    assert (finding.ranks, checked) == (RankSet([0, 2]), ("HNG999",))


def test_the_report_tells_who_was_looked_at():
    report = judged(stacks(0), stacks(2, hostname="node1", pid=7))
    assert (report.run.id, report.run.world_size) == ("node0:29500", 4)
    assert report.run.outcome is Outcome.RUNNING
    assert [(info.rank, info.hostname, info.pid) for info in report.run.ranks] == [
        (0, "node0", 1),
        (2, "node1", 7),
    ]
    assert report.silent_ranks == RankSet([1, 3])
