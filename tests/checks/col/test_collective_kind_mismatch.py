import pytest

from distdiag.checks.col.collective_kind_mismatch import CollectiveKindMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.findings.source import location_of
from tests.checks.streams import Job, Program, plain_site
from tests.checks.verdicts import findings


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_one_rank_with_another_operation_is_odd(order):
    job = Job(4)
    for rank in order:
        job.call(rank, plain_site(20 if rank == 3 else 10), "barrier" if rank == 3 else "broadcast")
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert (finding.ranks, finding.grade) == (RankSet([3]), Grade.PROVEN)
    assert "broadcast on ranks 0-2 at train.py:10 but barrier on rank 3" in finding.message


def test_two_ranks_that_disagree_are_both_named():
    job = Job()
    job.call(0, plain_site(10))
    job.call(1, plain_site(10), "barrier")
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_the_rank_that_is_at_the_later_line_skipped_the_earlier_one(tmp_path):
    p = Program(tmp_path, "def main():\n    if ok:\n        dist.all_reduce(x)\n    dist.barrier()")
    job = Job()
    job.call(0, p.site("all_reduce"))
    job.call(1, p.site("barrier"), "barrier")
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert finding.ranks == RankSet([1])
    assert finding.location == location_of(p.frame("if ok"))
    assert "`if ok:` decides whether the call is made" in finding.evidence[-1].summary
    assert finding.fix.startswith("Find out why `if ok:` (line 2) is decided differently on rank 1")


@pytest.mark.parametrize(
    "body",
    [
        "    if ok:\n        dist.all_reduce(x)\n",
        "    if not ok:\n        return\n    dist.all_reduce(x)\n",
    ],
    ids=["under it", "behind a way out"],
)
@pytest.mark.parametrize("ranks", [(1,), (0, 2)], ids=["skipped by one", "made by one"])
def test_the_condition_is_named_in_a_larger_job_too(tmp_path, body, ranks):
    p = Program(tmp_path, f"def step():\n{body}\ndef main():\n    step()\n    dist.barrier()")
    job = Job(3)
    for rank in range(3):
        skips = rank in ranks
        job.call(
            rank,
            p.site("dist.barrier") if skips else p.site("dist.all_reduce", "    step()"),
            "barrier" if skips else "all_reduce",
        )
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert finding.location.line == 2
    assert "ok" in finding.fix


def test_a_condition_that_both_calls_stand_under_is_none_that_parts_them(tmp_path):
    p = Program(
        tmp_path,
        "def main():\n    if ok:\n        dist.all_reduce(x)\n    else:\n        dist.barrier()",
    )
    job = Job(3)
    for rank in range(3):
        job.call(rank, p.site("dist.barrier" if rank else "all_reduce"), "barrier" if rank else "x")
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert finding.location == location_of(p.frame("all_reduce"))


def test_gaps_in_the_records_allow_a_note_only():
    job = Job()
    job.call(0)
    job.call(1, op="barrier")
    job.set(0, incomplete="a file is damaged")
    (finding,) = findings(CollectiveKindMismatch, job.alignment())
    assert finding.grade is Grade.NOTE


def test_equal_operations_are_silent():
    job = Job(4)
    job.every()
    assert not findings(CollectiveKindMismatch, job.alignment())
