"""How a run ended, from the order in which its ranks did."""

import pytest

from distdiag.engine.rank_status import RankStatuses
from distdiag.events.lifecycle import Exited, Finished, ProbeDisabled, Raised, RankStarted
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome

INTERRUPT = "KeyboardInterrupt"
GONE = "Connection closed by peer [127.0.0.1]:29500"


def finished(rank, status=0, time_ns=0):
    return Finished(rank=rank, seq=0, time_ns=time_ns, exit_status=status)


def raised(rank, thread="MainThread", time_ns=0, message="", kind="ValueError"):
    return Raised(
        rank=rank,
        seq=0,
        time_ns=time_ns,
        type=kind,
        message=message,
        frames=(),
        traceback="",
        thread=thread,
    )


def exited(rank, status=None, time_ns=0):
    return Exited(rank=rank, seq=-1, time_ns=time_ns, status=status)


@pytest.mark.parametrize(
    ("polls", "outcome"),
    [
        ([], Outcome.RUNNING),
        ([[finished(0)]], Outcome.RUNNING),
        ([[finished(0), finished(1)]], Outcome.FINISHED),
        ([[finished(0)], [finished(1)], [exited(0), exited(1)]], Outcome.FINISHED),
        ([[finished(0)], [finished(1, 3)]], Outcome.FAILED),
        ([[raised(1)], [exited(1)], [exited(0)]], Outcome.FAILED),
        ([[exited(1)], [raised(0)]], Outcome.KILLED),
        ([[raised(0), exited(1)]], Outcome.KILLED),  # the death was seen late: it came first
        ([[raised(0, "Thread-1")], [finished(0), finished(1)]], Outcome.FINISHED),
        # Seen in one look: the exception came first, the launcher ended the other rank then.
        ([[raised(0, time_ns=5), exited(1, -15, time_ns=6)]], Outcome.FAILED),
        ([[raised(0, time_ns=5), exited(1, -9, time_ns=4)]], Outcome.KILLED),
        # A killed process closes its connections before it is seen dead; a launcher waits.
        ([[raised(0, time_ns=5, message=GONE), exited(1, -9, time_ns=6)]], Outcome.KILLED),
        ([[raised(0, time_ns=5, message=GONE)], [exited(1, -9, time_ns=6)]], Outcome.KILLED),
        ([[raised(0, time_ns=5, message=GONE)], [exited(1, -15, time_ns=6)]], Outcome.FAILED),
        ([[raised(0, time_ns=5)], [exited(1, -9, time_ns=6)]], Outcome.FAILED),
        ([[raised(0, time_ns=5, message=GONE), exited(1, -15, time_ns=6)]], Outcome.FAILED),
        ([[raised(0, time_ns=5, message=GONE), exited(1, -9, time_ns=31 * 10**9)]], Outcome.FAILED),
        ([[exited(0, -15, time_ns=1), finished(1, 3, time_ns=2)]], Outcome.FAILED),
        # The launcher ended a rank after the other had raised, and nobody saw when.
        ([[exited(0, -15, time_ns=1), raised(1, time_ns=2)]], Outcome.FAILED),
        ([[exited(0, -15, time_ns=1)], [raised(1, time_ns=2)]], Outcome.FAILED),
        ([[exited(0, -15, time_ns=1)], [raised(1, time_ns=2, message=GONE)]], Outcome.KILLED),
        ([[exited(0, -15, time_ns=1), raised(1, time_ns=2, kind=INTERRUPT)]], Outcome.KILLED),
        ([[exited(0, -15)], [exited(1, -15)]], Outcome.KILLED),
        ([[finished(0, 143), finished(1, 143)]], Outcome.KILLED),
    ],
)
def test_the_first_bad_end_decides_the_outcome(polls, outcome):
    status = RankStatuses((0, 1))
    for events in polls:
        for event in events:
            status.feed(event)
        status.settle(is_hung=False)
    assert status.outcome is outcome


def test_what_ends_a_hung_run_does_not_change_that_it_hung():
    status = RankStatuses((0, 1))
    status.settle(is_hung=True)
    assert status.outcome is Outcome.HUNG
    status.feed(raised(0))
    status.settle(is_hung=False)
    assert status.outcome is Outcome.HUNG


def test_a_run_that_went_on_after_a_hang_has_finished():
    status = RankStatuses((0,))
    status.settle(is_hung=True)
    status.settle(is_hung=False)
    status.feed(finished(0))
    status.settle(is_hung=False)
    assert status.outcome is Outcome.FINISHED


def test_ranks_are_counted_by_how_they_ended():
    status = RankStatuses(range(5))
    for event in (finished(0), raised(1), exited(2), finished(3), exited(3)):
        status.feed(event)
    assert status.ended == RankSet((0, 2, 3))
    assert status.died == RankSet((2,))
    assert status.undisturbed == RankSet((4,))
    assert status.exit_status == {0: 0, 1: 1, 3: 0}
    status.feed(exited(4, -9))
    assert status.exit_status[4] == -9


def test_a_rank_without_an_agent_is_not_waited_for_and_did_not_die():
    status = RankStatuses((0, 1))
    status.feed(ProbeDisabled(rank=1, seq=-1, time_ns=0, probe="agent", reason="no room"))
    assert not status.is_over
    status.feed(finished(0))
    status.settle(is_hung=False)
    assert status.is_over
    assert status.outcome is Outcome.FINISHED
    assert status.unobserved == RankSet([1])
    assert status.died == RankSet()


def test_a_rank_that_let_its_agent_go_is_still_waited_for():
    status = RankStatuses((0,))
    status.feed(
        RankStarted(
            rank=0, seq=0, time_ns=0, local_rank=0, world_size=1, hostname="", pid=1, python="",
            command=(), unix_ns=0,
        )
    )  # fmt: skip
    status.feed(ProbeDisabled(rank=0, seq=-1, time_ns=0, probe="agent", reason="detached"))
    assert status.unobserved == RankSet()
