import pytest

from distdiag.checks.hng.no_progress import NoProgress
from distdiag.events.base import Phase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, stacks
from tests.checks.verdicts import codes, findings


def judged(job):
    return findings(NoProgress, job.view())


def test_ranks_that_all_stand_in_a_lock_are_named_with_the_line(tmp_path):
    p = Program(tmp_path, "def main():\n    lock.acquire()")
    job = Job()
    for rank in job.world:
        job.set(rank, idle_s=31.0, stacks=stacks(rank, p.frame("lock")))
    (finding,) = judged(job)
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)
    assert (finding.location.line, finding.severity) == (2, Severity.ERROR)


def test_contradictory_records_explain_the_stall():
    job = Job()
    job.call(0)
    job.call(1, op="barrier")
    job.set(0, 1, idle_s=31.0)
    assert not judged(job)


def test_a_rank_that_never_started_is_the_one_that_the_others_wait_for():
    job = Job()
    job.set(0, idle_s=31.0)
    job.set(1, status=RankStatus.SILENT)
    assert judged(job)[0].ranks == RankSet([1])


def test_ranks_that_work_are_a_note():
    job = Job()
    job.set(0, 1, idle_s=31.0, is_working=True)
    assert judged(job)[0].severity is Severity.INFO


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_missing_rank_is_left_to_the_collective(num_ranks):
    job = Job(num_ranks)
    job.call(0)
    job.set(*job.world, idle_s=31.0, phase=Phase.SCRIPT)
    assert not judged(job)
    assert codes(job.alignment(trigger=Trigger.STALLED)) == ["COL001"]


@pytest.mark.parametrize(
    "change",
    [
        {"idle_s": 0.2},
        {"status": RankStatus.FINISHED},
        {"status": RankStatus.RAISED},
        {"status": RankStatus.DIED},
    ],
    ids=["moves", "finished", "raised", "died"],
)
def test_a_job_that_moves_or_fails_for_another_reason_is_silent(change):
    job = Job()
    job.set(0, idle_s=31.0 if change.get("status") is not RankStatus.FINISHED else 0.0)
    job.set(1, **change)
    assert not judged(job)
