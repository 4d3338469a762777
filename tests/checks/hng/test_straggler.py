from distdiag.checks.hng.straggler import Straggler
from distdiag.events.base import Phase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, kernel
from tests.checks.verdicts import all_findings, findings


def test_a_rank_that_computes_is_a_note_with_its_name():
    job = Job()
    job.call(0)
    job.set(1, is_working=True, phase=Phase.FORWARD, idle_s=40.0)
    (finding,) = all_findings(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.severity) == ("HNG015", Severity.INFO)
    assert finding.ranks == RankSet([1])
    assert "40 s" in finding.message


def test_a_rank_that_does_not_compute_is_no_straggler():
    job = Job()
    job.call(0)
    job.set(1, phase=Phase.FORWARD, idle_s=40.0)
    assert not findings(Straggler, job.alignment(trigger=Trigger.STALLED))


def test_who_waits_for_a_straggler_outside_of_a_call_is_not_accused():
    job = Job()
    job.call(0, is_async=True)  # as DDP's reducer does
    job.set(0, idle_s=40.0, observed=kernel(0, "futex"))
    job.set(1, idle_s=40.0, is_working=True)
    alignment = job.alignment(trigger=Trigger.STALLED)
    assert [f.code for f in all_findings(alignment)] == ["HNG015"]


def test_a_rank_that_waits_for_its_turn_on_a_processor_is_a_straggler():
    job = Job()
    job.call(0)
    job.set(1, idle_s=40.0, observed=kernel(1, state="R"))
    assert [f.code for f in all_findings(job.alignment(trigger=Trigger.STALLED))] == ["HNG015"]
