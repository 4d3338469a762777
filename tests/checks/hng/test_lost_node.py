import pytest

from distdiag.checks.hng.lost_node import WAITS_IN_VAIN_S, LostNode
from distdiag.events.base import Frame
from distdiag.events.lifecycle import NodeLost
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, event_of, plain_site
from tests.checks.verdicts import findings


@pytest.fixture
def job():
    """Four ranks on two nodes; nothing is heard of the second one since 5."""
    job = Job(4)
    job.every(plain_site(3), step=7)
    for rank in (2, 3):
        lost = event_of(NodeLost, rank, time_ns=5, hostname="host-1", silent_s=20.3)
        job.set(rank, lost=lost, step=7)
    return job


def judged(job):
    return findings(LostNode, job.view())


def test_a_node_whose_loss_ends_the_job_is_named_with_its_ranks(job):
    job.lose_peer(0, 6)
    job.lose_peer(1, 6)
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([2, 3]), Severity.ERROR)
    assert (
        "node host-1 with ranks 2-3 was lost: nothing was heard of it for 20 s" in finding.message
    )
    assert finding.step == 7
    assert "all_reduce #0" in finding.evidence[0].summary


def test_a_node_for_which_the_others_wait_in_vain_is_named(job):
    for rank in (0, 1):
        job.call(rank, plain_site(4))
    assert judged(job) == []
    job.set(0, idle_s=WAITS_IN_VAIN_S)
    assert [finding.ranks for finding in judged(job)] == [RankSet([2, 3])]


def test_others_that_their_launcher_ends_because_of_it_do_not_hide_it(job):
    for rank in (0, 1):
        job.set(rank, status=RankStatus.DIED, exit_status=-15, left_ns=9)
    assert [finding.ranks for finding in judged(job)] == [RankSet([2, 3])]


def test_an_error_of_a_library_that_nobody_knows_may_have_come_of_it(job):
    job.lose_peer(0, 6, "unhandled system error")
    assert len(judged(job)) == 1


@pytest.mark.parametrize("left_ns", [4, 6])
def test_an_error_of_the_program_itself_has_its_own_reasons(job, left_ns):
    job.fail(0, left_ns, Frame("train.py", 7, "main"), message="no such file")
    assert judged(job) == []


def test_a_failure_before_that_is_the_cause(job):
    job.lose_peer(0, 4, "unhandled system error")
    assert judged(job) == []


def test_a_node_of_which_only_the_monitor_was_lost_is_not_named(job):
    assert judged(job) == []
    job.set(0, 1, status=RankStatus.FINISHED, left_ns=9)
    assert judged(job) == []


def test_ranks_that_had_ended_are_not_lost(job):
    job.set(2, 3, status=RankStatus.FINISHED, left_ns=4)
    job.lose_peer(0, 6)
    assert judged(job) == []
