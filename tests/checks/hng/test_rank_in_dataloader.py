import pytest

from distdiag.checks.hng.rank_in_dataloader import RankInDataloader
from distdiag.events.base import Frame, Phase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, Program, stacks
from tests.checks.verdicts import findings, serious

LOADER = Frame("/site-packages/torch/utils/data/dataloader.py", 9, "__next__", user=False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_in_its_loader_replaces_the_missing_rank(num_ranks):
    job = Job(num_ranks)
    for rank in job.world - RankSet([1]):
        job.call(rank)
    job.set(1, phase=Phase.DATALOADER, idle_s=30.0)
    (finding,) = serious(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.severity) == ("HNG004", Severity.WARNING)
    assert finding.ranks == RankSet([1])


def test_the_stack_shows_the_loader_and_the_line_that_asked_for_the_batch(tmp_path):
    p = Program(tmp_path, "def main():\n    for batch in loader:\n        loss.backward()")
    job = Job()
    job.every(p.site("backward"))
    job.call(0, p.site("backward"))
    job.set(1, stacks=stacks(1, LOADER, p.frame("in loader")), idle_s=30.0)
    (finding,) = serious(job.alignment(trigger=Trigger.STALLED))
    assert (finding.code, finding.location.line) == ("HNG004", 2)


def test_a_stack_outside_of_the_loader_is_believed_more_than_the_phase(tmp_path):
    p = Program(tmp_path, "def main():\n    lock.acquire()")
    job = Job()
    job.call(0)
    job.set(1, phase=Phase.DATALOADER, stacks=stacks(1, p.frame("lock")))
    assert not findings(RankInDataloader, job.alignment(trigger=Trigger.STALLED))


def test_a_loader_that_works_is_a_note():
    job = Job()
    job.call(0)
    job.set(1, phase=Phase.DATALOADER, is_working=True)
    (finding,) = findings(RankInDataloader, job.alignment(trigger=Trigger.STALLED))
    assert finding.severity is Severity.INFO


def test_a_rank_that_is_elsewhere_is_silent():
    job = Job()
    job.call(0)
    job.set(1, phase=Phase.FORWARD)
    assert not findings(RankInDataloader, job.alignment(trigger=Trigger.STALLED))
