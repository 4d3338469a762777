from distdiag.alignment import Phase, Trigger
from distdiag.checks.straggler import Straggler
from distdiag.finding import Severity
from distdiag.ranks import RankSet
from tests.checks.streams import Job, missing
from tests.checks.verdicts import all_findings


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
    assert not missing(job, Straggler, Trigger.STALLED)
