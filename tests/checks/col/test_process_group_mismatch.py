import pytest

from distdiag.checks.col.process_group_mismatch import ProcessGroupMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, plain_site
from tests.checks.verdicts import findings

SITE = plain_site(5)


def judged(calls, num_ranks=4):
    return findings(ProcessGroupMismatch, Job(num_ranks).creation(calls))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_the_rank_that_builds_another_group_is_odd(order):
    (finding,) = judged({r: ((2, 3) if r == 1 else (0, 1), SITE) for r in order})
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)
    assert "new_group([2, 3]) on rank 1" in finding.message


def test_two_ranks_that_build_groups_in_another_order_are_both_named():
    (finding,) = judged({0: ((0, 1), SITE), 1: ((1,), plain_site(7))}, num_ranks=2)
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


@pytest.mark.parametrize(
    "other", [((1, 0), SITE), ((0, 1), SITE, {"desc": "tp"})], ids=["order", "description"]
)
def test_the_same_members_by_another_name_or_order_are_a_note(other):
    (finding,) = judged({0: ((0, 1), SITE), 1: other}, num_ranks=2)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize("split", [[(0, 1)] * 2 + [(2, 3)] * 2, [(0, 2), (1, 3)] * 2])
def test_a_split_in_which_each_rank_names_its_own_part_is_silent(split):
    calls = {r: (ranks, SITE, {"api": "split_group"}) for r, ranks in enumerate(split)}
    assert not judged(calls)


def test_equal_groups_are_silent():
    assert not judged({r: ((0, 1), SITE) for r in range(4)})


GUARDED = """
    def main():
        if rank in members:
            dist.new_group(members)
        dist.barrier()
    """


def test_a_group_that_only_its_members_create_is_reported_with_the_guard(tmp_path):
    p = Program(tmp_path, GUARDED)
    job = Job(4)
    for rank in (2, 3):
        job.call(rank, p.site("dist.barrier"), "barrier")
    site = p.site("new_group")
    alignment = job.creation({r: ((0, 1), site) for r in (1, 0)}, Trigger.STALLED)
    (finding,) = findings(ProcessGroupMismatch, alignment)
    assert finding.ranks == RankSet([0, 1])
    assert "under `if rank in members:`" in finding.message
    assert finding.location.line == p.line("new_group")


def test_a_rank_that_finished_without_creating_the_group_is_named():
    job = Job(2)
    job.set(1, status=RankStatus.FINISHED)
    alignment = job.creation({0: ((0, 1), SITE)}, Trigger.LEFT)
    (finding,) = findings(ProcessGroupMismatch, alignment)
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)


def test_a_rank_that_works_on_its_way_there_is_a_note():
    job = Job(2)
    job.set(1, is_working=True)
    alignment = job.creation({0: ((0, 1), SITE)}, Trigger.STALLED)
    (finding,) = findings(ProcessGroupMismatch, alignment)
    assert finding.severity is Severity.INFO


def test_a_failed_rank_is_left_to_its_own_check():
    job = Job(2)
    job.fail(1)
    alignment = job.creation({0: ((0, 1), SITE)}, Trigger.LEFT)
    assert not findings(ProcessGroupMismatch, alignment)
