import pytest

from distdiag.checks.shared.culprits import Reason, blame, blame_cycle, blame_missing, group_by
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, plain_site


def test_a_strict_majority_decides_before_anything_else():
    job = Job(5)
    for rank in job.world:
        job.call(rank, op="barrier" if rank == 2 else "all_reduce")
    alignment = job.alignment()
    groups = group_by(alignment, lambda call: call.signature.op)
    verdict = blame(alignment, groups)
    assert (verdict.culprits, verdict.reason) == (RankSet([2]), Reason.MAJORITY)
    assert verdict.grade is Grade.PROVEN


def test_equal_camps_are_all_culprits_and_at_most_likely():
    job = Job(4)
    for rank in job.world:
        job.call(rank, op="barrier" if rank % 2 else "all_reduce")
    alignment = job.alignment()
    verdict = blame(alignment, group_by(alignment, lambda call: call.signature.op))
    assert (verdict.culprits, verdict.grade) == (RankSet(range(4)), Grade.LIKELY)


def test_the_rank_that_waits_for_nobody_is_the_one_that_all_wait_for():
    job = Job(3)
    pair = job.group((1, 2), "pair")
    job.call(0)
    job.call(2, plain_site(20), group=pair)
    verdict = blame_missing(job.alignment(0, trigger=Trigger.STALLED))
    assert (verdict.culprits, verdict.reason) == (RankSet([1]), Reason.BEHIND)


@pytest.mark.parametrize(
    ("present", "culprits"), [((0, 1, 2), [3]), ((3,), [3])], ids=["one left", "one came"]
)
def test_when_ranks_have_finished_the_fewer_side_is_odd(present, culprits):
    job = Job(4)
    for rank in present:
        job.call(rank)
    job.set(*(job.world - RankSet(present)), status=RankStatus.FINISHED)
    assert blame_missing(job.alignment(trigger=Trigger.LEFT)).culprits == RankSet(culprits)


def test_both_sides_of_a_circle_of_two_are_culprits():
    job = Job()
    job.call(0)
    verdict = blame_cycle(job.alignment(trigger=Trigger.CYCLE))
    assert (verdict.culprits, verdict.grade) == (RankSet([0, 1]), Grade.LIKELY)
