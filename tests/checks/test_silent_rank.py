from distdiag.alignment import Fate
from distdiag.checks.silent_rank import SilentRank
from distdiag.ranks import RankSet
from tests.checks.streams import Job


def judged(job):
    return list(SilentRank().check_ranks(job.view()))


def test_ranks_without_any_event_are_named_at_the_end():
    job = Job(4)
    job.set(0, 1, fate=Fate.FINISHED)
    job.set(2, 3, fate=Fate.SILENT)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([2, 3])


def test_nothing_is_said_while_ranks_run():
    job = Job()
    job.set(1, fate=Fate.SILENT)
    assert not judged(job)


def test_ranks_that_were_heard_of_are_silent():
    job = Job()
    job.set(0, 1, fate=Fate.FINISHED)
    assert not judged(job)
