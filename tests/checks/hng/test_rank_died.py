import pytest

from distdiag.checks.hng.rank_died import RankDied
from distdiag.events.base import Frame
from distdiag.events.lifecycle import Exited, Finished
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed
from distdiag.findings.finding import Severity
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, event_of, signature
from tests.checks.verdicts import codes, findings, serious

S = 1_000_000_000
LINE = Frame("train.py", 7, "main")


def judged(job):
    return findings(RankDied, job.view())


def die(job, rank, left_ns, status=None, oom_kills=0, gone_ns=0):
    exited = event_of(
        Exited, rank, time_ns=left_ns, status=status, oom_kills=oom_kills, gone_ns=gone_ns
    )
    job.set(
        rank, status=RankStatus.DIED, left_ns=left_ns, exit_status=status, exited=exited, idle_s=2.0
    )


def leave(job, rank, left_ns, status, frame=LINE):
    finished = event_of(Finished, rank, exit_status=status, frames=(frame,))
    job.set(
        rank, status=RankStatus.FINISHED, left_ns=left_ns, exit_status=status, finished=finished
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_killed_rank_is_named_with_what_it_did_last(num_ranks):
    job = Job(num_ranks)
    job.every(step=3)
    die(job, 1, 5, -9)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])
    assert "died by SIGKILL" in finding.message
    assert "it had last called all_reduce #0" in finding.message


def ended(*ends, **values):
    """What is found where these ranks end: rank, when, and status, which is minus a signal."""
    job = Job(len(ends))
    for rank, left_ns, status in ends:
        if status < 0:
            die(job, rank, left_ns, status, **values)
        else:
            leave(job, rank, left_ns, status)
    (finding,) = judged(job)
    return finding


@pytest.mark.parametrize(
    ("ends", "ranks", "words"),
    [
        ([(3, 5 * S, -9), (0, 8 * S, -15), (1, 8 * S, -15), (2, 40 * S, -9)], [3], "SIGKILL"),
        ([(0, 5, -15), (1, 9, -11)], [1], "died by SIGSEGV"),
        (
            [(1, 5, 3), (0, 4, -15)],
            [1],
            "rank 1 exited with status 3 at train.py:7, before rank 0 had finished",
        ),
    ],
    ids=[
        "stopped by the launcher afterwards",
        "a crash, whenever it was seen",
        "an exit status",
    ],
)
def test_the_rank_whose_end_is_the_cause_is_named(ends, ranks, words):
    finding = ended(*ends)
    assert (finding.ranks, finding.severity) == (RankSet(ranks), Severity.ERROR)
    assert words in finding.message


@pytest.mark.parametrize(("apart_ns", "cause"), [(20, [1]), (21, [0, 1])])
def test_a_killed_rank_is_the_cause_if_it_may_have_ended_before_the_others_were_gone(
    apart_ns, cause
):
    job = Job()
    die(job, 0, 5, -15, gone_ns=25)
    die(job, 1, 5 + apart_ns, -9, gone_ns=5 + apart_ns)
    (finding,) = judged(job)
    assert finding.ranks == RankSet(cause)
    assert (finding.severity is Severity.ERROR) is (len(cause) == 1)


def test_a_crash_is_explained_and_all_signals_are_evidence():
    finding = ended((0, 5, -15), (1, 9, -11))
    assert "native code" in finding.why
    assert [e.values for e in finding.evidence] == [{"signal": "SIGTERM"}, {"signal": "SIGSEGV"}]
    assert ended((1, 5, 3), (0, 4, -15)).location.line == 7


def test_all_ranks_that_run_out_of_memory_at_once_are_an_error():
    finding = ended((0, 5, -9), (1, 5, -9), oom_kills=2)
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.ERROR)


def test_the_same_exit_of_all_ranks_is_a_note():
    finding = ended((0, 5, 2), (1, 6, 2))
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.INFO)


@pytest.mark.parametrize(
    ("statuses", "apart_ns"),
    [
        ((-15, -15), 1),
        ((-15, -9), 30 * S),  # the second did not obey, and was killed
        ((143, 143), 1),
        ((-9, -9), 1),
        ((-2, -2), 1),
    ],
)
def test_all_ranks_were_ended_from_outside(statuses, apart_ns):
    finding = ended(*((rank, 5 + rank * apart_ns, status) for rank, status in enumerate(statuses)))
    assert finding.severity is Severity.INFO
    assert "ranks 0-1 were all ended from outside" in finding.message
    assert "scheduler" in finding.fix + finding.why
    assert "memory" not in finding.fix


def test_memory_is_blamed_only_where_the_kernel_has_killed_for_it():
    job = Job()
    die(job, 0, 9, -15)
    die(job, 1, 5, -9)
    (finding,) = judged(job)
    assert "memory" not in finding.fix
    die(job, 1, 5, -9, oom_kills=1)
    (finding,) = judged(job)
    assert "memory" in finding.fix and "kernel" in finding.why
    assert finding.evidence[1].values["processes_killed_for_memory"] == 1


def test_an_exit_in_a_loop_is_an_exit_with_its_status(tmp_path):
    program = Program(tmp_path, "for batch in loader:\n    all_reduce(batch)\nbarrier()\n")
    job = Job()
    for _ in range(3):
        job.every(program.site("all_reduce(batch)"))
    job.call(0, program.site("all_reduce(batch)"))
    leave(job, 1, 5, 3)
    found = serious(job.alignment(trigger=Trigger.LEFT))
    assert [(f.code, f.ranks, f.location.line) for f in found] == [("HNG002", RankSet([1]), 7)]


@pytest.mark.parametrize("status", [-15, -9])
def test_nothing_is_reported_of_a_signal_until_it_is_known_whom_it_ends(status):
    job = Job()
    die(job, 0, 5, status)
    job.set(0, idle_s=0.1)
    assert judged(job) == []
    job.set(1, is_over=True)
    assert [f.ranks for f in judged(job)] == [RankSet([0])]


def test_one_rank_that_somebody_ended_while_the_others_wait_is_an_error():
    job = Job()
    job.every()
    job.call(1)
    die(job, 0, 5, -15)
    assert judged(job) == []
    job.set(0, idle_s=31.0)
    assert [(f.ranks, f.severity) for f in judged(job)] == [(RankSet([0]), Severity.ERROR)]


def test_one_rank_that_somebody_ended_is_the_cause_of_what_the_others_meet():
    job = Job()
    job.lose_peer(0, 6)
    die(job, 1, 5, -15)
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([1]), Severity.ERROR)
    assert "rank 1 was ended by SIGTERM" in finding.message


def test_a_rank_that_the_launcher_ends_after_an_error_about_a_peer_is_not_reported():
    job = Job()
    job.lose_peer(0, 4, "Timed out waiting 1000ms")
    die(job, 1, 5, -15)
    assert judged(job) == []


def test_a_rank_that_raised_before_is_the_cause():
    job = Job()
    job.fail(0, 4)
    die(job, 1, 5)
    assert not judged(job)
    assert codes(job.view()) == ["HNG001"]


def test_an_error_about_the_lost_peer_does_not_excuse_the_death():
    job = Job()
    job.lose_peer(0, 4)
    die(job, 1, 5)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])


def test_an_abort_over_contradictory_collectives_is_a_note():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(numel=4 + rank))
    die(job, 1, 5, -6)
    (finding,) = judged(job)
    assert finding.severity is Severity.INFO


def test_both_ways_to_see_it_give_one_finding():
    job = Job()
    job.every()
    job.call(0)
    die(job, 1, 5)
    assert codes(job.alignment(trigger=Trigger.LEFT)) == ["HNG002"]


def test_ranks_that_finished_are_silent():
    job = Job()
    job.set(0, 1, status=RankStatus.FINISHED)
    assert not judged(job)


def report(rank, status, cause="", **values):
    """The only thing that is known of a rank: a launcher tells how it ended."""
    job = Job(1)
    exited = event_of(Exited, rank, time_ns=5, status=status, cause=cause)
    job.set(rank, status=RankStatus.DIED, left_ns=5, exit_status=status, exited=exited, idle_s=2.0)
    job.set(rank, is_reported_only=True, **values)
    (finding,) = judged(job)
    return finding


@pytest.mark.parametrize(
    ("status", "cause", "severity", "message", "advice"),
    [
        (-9, "", Severity.ERROR, "died by SIGKILL", "dmesg"),
        (-9, "out-of-memory", Severity.ERROR, "died by SIGKILL for want of memory", "--mem"),
        (-7, "", Severity.ERROR, "died by SIGBUS", "/dev/shm"),
        (-11, "", Severity.ERROR, "died by SIGSEGV", "faulthandler"),
        (1, "", Severity.ERROR, "exited with status 1", "--redirects 3"),
        (-15, "time-limit", Severity.INFO, "at the time limit of the job", "more time"),
        (-15, "preempted", Severity.INFO, "to make room for another job", "queued again"),
        (-15, "node-failed", Severity.INFO, "since a node failed", "--exclude"),
        (-15, "cancelled", Severity.INFO, "since the job was cancelled", "who cancelled"),
    ],
)
def test_advice_follows_from_how_a_launcher_says_that_it_ended(
    status, cause, severity, message, advice
):
    finding = report(0, status, cause)
    assert finding.severity is severity
    assert message in finding.message
    assert advice in finding.fix


def test_a_process_without_a_rank_is_called_by_its_name():
    assert report(0, -9, label="worker-2").message.startswith("worker-2 died by SIGKILL")


def test_all_ranks_that_a_container_ends_for_want_of_memory_are_an_error():
    job = Job(2)
    for rank in (0, 1):
        exited = event_of(Exited, rank, time_ns=5, status=-9, cause="out-of-memory")
        job.set(rank, status=RankStatus.DIED, left_ns=5, exit_status=-9, exited=exited, idle_s=2.0)
    (finding,) = judged(job)
    assert finding.severity is Severity.ERROR


def test_a_rank_that_aborts_since_its_collective_timed_out_is_a_victim():
    job = Job(2)
    die(job, 0, 5, -6)
    die(job, 1, 9, -11)
    seen = Observed(
        rank=0, seq=-1, time_ns=0, source="nccl-log", summary="", values={"kind": "timeout"}
    )
    job.set(0, observed={"nccl-log": seen})
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])
