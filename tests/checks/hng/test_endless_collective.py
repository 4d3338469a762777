from distdiag.checks.hng.endless_collective import EndlessCollective
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed
from tests.checks.streams import Job, event_of
from tests.checks.verdicts import findings


def _judged(job):
    calls = tuple(calls[-1] for calls in job.calls.values() if calls)
    return findings(EndlessCollective, job.view(waiting=calls))


def test_a_collective_that_all_came_to_and_that_does_not_end_is_named():
    job = Job(4)
    job.every()
    job.set(*job.world, idle_s=31.0)
    (finding,) = _judged(job)
    assert finding.ranks == RankSet()  # nobody is known to be at fault
    assert "all_reduce #0" in finding.message
    assert finding.subjects == ("default_pg",)


def test_what_the_gpus_say_is_evidence():
    job = Job()
    job.every()
    job.set(*job.world, idle_s=31.0)
    seen = event_of(Observed, 1, source="nvml", summary="the GPU has an Xid 79")
    job.set(1, observed={"nvml": seen})
    (finding,) = _judged(job)
    assert any("Xid 79" in e.summary and e.ranks == RankSet([1]) for e in finding.evidence)


def test_a_rank_that_has_not_come_is_no_fault_of_the_network():
    job = Job()
    job.call(0)
    job.set(*job.world, idle_s=31.0)
    assert not _judged(job)


def test_a_job_that_moves_is_silent():
    job = Job()
    job.every()
    job.set(*job.world, idle_s=0.1)
    assert not _judged(job)
