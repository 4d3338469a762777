import pytest

from distdiag.checks.col.rank_guarded_collective import RankGuardedCollective
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.streams import Job, Program, stacks
from tests.checks.verdicts import codes, findings, serious

SAVE = """
    def save():
        dist.barrier()

    def main():
        for step in range(9):
            loss.backward()
            if rank == 0:
                save()
        finish()
    """


def found(job, **where):
    return findings(RankGuardedCollective, job.alignment(**where))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_the_guarded_rank_is_named_with_its_guard(tmp_path, order):
    p = Program(tmp_path, SAVE)
    job = Job(4)
    for rank in order:
        site = p.site("dist.barrier", "    save()") if rank == 0 else p.site("backward")
        job.call(rank, site, "barrier" if rank == 0 else "all_reduce")
    (finding,) = found(job)
    assert (finding.ranks, finding.grade) == (RankSet([0]), Grade.PROVEN)
    assert "under `if rank == 0:` in line 7" in finding.message
    assert {e.location.line for e in finding.evidence} == {2, 6, 7}


def test_a_call_that_the_others_never_make_before_they_finish(tmp_path):
    p = Program(tmp_path, SAVE)
    job = Job()
    job.call(0, p.site("dist.barrier", "    save()"), "barrier")
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = found(job, trigger=Trigger.LEFT)
    assert finding.ranks == RankSet([0])
    assert codes(job.alignment(trigger=Trigger.LEFT)) == ["COL009"]


def test_most_ranks_behind_an_early_return_name_the_one_that_returned(tmp_path):
    p = Program(tmp_path, "def main():\n    if rank == 0:\n        return\n    dist.barrier()")
    job = Job(4)
    for rank in (3, 2, 1):
        job.call(rank, p.site("barrier"), "barrier")
    job.set(0, status=RankStatus.FINISHED)
    (finding,) = found(job, trigger=Trigger.LEFT)
    assert finding.ranks == RankSet([0])


def test_a_rank_that_is_late_on_its_way_to_the_guard_is_not_kept_away_by_it(tmp_path):
    p = Program(tmp_path, SAVE)
    job = Job()
    job.call(0, p.site("dist.barrier", "    save()"), "barrier")
    job.set(1, stacks=stacks(1, p.frame("loss.backward")))
    assert not found(job, trigger=Trigger.STALLED)
    job.set(1, stacks=stacks(1, p.frame("finish()")))
    assert found(job, trigger=Trigger.STALLED)


def test_a_guard_that_the_missing_rank_passed_before_does_not_keep_it_away(tmp_path):
    p = Program(tmp_path, SAVE)
    site = p.site("dist.barrier", "    save()")
    job = Job()
    job.every(site, "barrier")
    job.call(0, site, "barrier")
    job.set(1, stacks=stacks(1, p.frame("finish()")))
    assert not found(job, trigger=Trigger.STALLED)


def test_a_guard_that_all_ranks_are_under_is_silent(tmp_path):
    p = Program(
        tmp_path,
        "def main():\n    if rank < 2:\n        dist.barrier()\n        dist.all_reduce(x)",
    )
    job = Job()
    job.call(0, p.site("barrier"), "barrier")
    job.call(1, p.site("all_reduce"))
    assert not found(job)


def test_a_shape_mismatch_below_one_guard_is_no_guarded_call(tmp_path):
    p = Program(tmp_path, "def main():\n    if rank == 0:\n        dist.barrier()")
    job = Job()
    job.every(p.site("barrier"))
    assert not found(job)


def test_two_branches_of_one_condition_that_fit_are_silent(tmp_path):
    p = Program(
        tmp_path,
        "def main():\n    if rank == 0:\n        send(x)\n    else:\n        receive(x)",
    )
    job = Job()
    job.call(0, p.site("send(x)"), "broadcast")
    job.call(1, p.site("receive(x)"), "broadcast")
    assert not serious(job.alignment())
