import pytest

from distdiag.checks.col.missing_from_collective import MissingFromCollective
from distdiag.events.base import Phase
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed
from distdiag.findings.finding import Grade
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import RankStatus
from tests.checks.races import access
from tests.checks.streams import Job, Program, event_of, plain_site, signature, stacks
from tests.checks.verdicts import codes, findings, serious


def found(job, **where):
    return findings(MissingFromCollective, job.alignment(**where))


def test_a_rank_that_finished_is_named_as_missing_with_proof():
    job = Job()
    job.every()
    job.call(0, plain_site(30), "barrier")
    job.set(1, status=RankStatus.FINISHED)
    (finding,) = found(job, trigger=Trigger.LEFT)
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.PROVEN)
    assert "rank 1 has finished its script" in finding.message
    assert finding.location.line == 30


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_one_of_four_is_missing_whatever_the_order_of_arrival(order):
    job = Job(4)
    for rank in order:
        if rank != 2:
            job.call(rank)
    (finding,) = found(job, trigger=Trigger.STALLED)
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.LIKELY)
    assert [str(e.ranks) for e in finding.evidence] == ["0-1,3", "2"]


def test_the_stack_of_a_stuck_rank_gives_the_line(tmp_path):
    p = Program(tmp_path, "def main():\n    lock.acquire()\n    dist.barrier()")
    job = Job()
    job.call(0, p.site("dist.barrier"), "barrier")
    job.set(1, stacks=stacks(1, p.frame("lock.acquire")))
    (finding,) = found(job, trigger=Trigger.STALLED)
    assert finding.location.source == "lock.acquire()"


def test_the_file_that_a_missing_rank_asks_for_is_named(tmp_path):
    p = Program(tmp_path, "while not path.exists():\n    time.sleep(1)\ndist.barrier()")
    here, asked = p.frame("time.sleep"), p.frame("while not")
    values = {"waits_for": "file", "name": "/data/rank_1.pt", "asked_file": asked.file}
    values |= {"asked_line": asked.line, "asked_by": f"{asked.file}:{asked.function}"}
    made = access(0, "write", plain_site(7), "/data/rank_0.pt").event
    job = Job()
    job.call(0, p.site("dist.barrier"), "barrier")
    job.set(0, made=(made,))
    seen = event_of(Observed, 1, source="holders", summary="", values=values)
    job.set(1, stacks=stacks(1, here), observed={"holders": seen})
    (finding,) = found(job, trigger=Trigger.STALLED)
    assert "it asks again and again for /data/rank_1.pt, which is not there" in finding.message
    assert "rank 0 made /data/rank_0.pt at train.py:7" in finding.message
    assert finding.evidence[-1].location.line == 7
    assert finding.fix.endswith("use one name.")


def test_two_groups_in_opposite_order_are_one_circle_and_one_finding():
    job = Job()
    a, b = job.group(name="a"), job.group(name="b")
    job.call(0, plain_site(10), group=a)
    job.call(1, plain_site(11), group=b)
    first, second = (found(job, trigger=Trigger.CYCLE, group=g)[0] for g in (a, b))
    assert first.ranks == second.ranks == RankSet([0, 1])
    assert "same order" in first.fix


def test_a_rank_that_works_is_late_and_left_to_the_check_of_stragglers():
    job = Job()
    job.call(0)
    job.set(1, is_working=True, phase=Phase.FORWARD)
    assert not found(job, trigger=Trigger.STALLED)


def test_records_with_gaps_allow_a_note_only():
    job = Job()
    job.call(0)
    job.set(1, status=RankStatus.FINISHED, incomplete="disk full")
    (finding,) = found(job, trigger=Trigger.LEFT)
    assert finding.grade is Grade.NOTE


def test_a_job_that_was_cut_off_accuses_nobody():
    job = Job()
    job.call(0)
    assert serious(job.alignment(trigger=Trigger.ENDED)) == []


def test_a_failure_is_left_to_its_own_check():
    job = Job()
    job.call(0)
    job.fail(1)
    assert not found(job, trigger=Trigger.LEFT)
    assert codes(job.alignment(trigger=Trigger.LEFT)) == ["HNG001"]


def test_a_rank_that_waits_for_a_message_is_left_to_the_messages():
    job = Job()
    job.call(0, op="barrier")
    job.call(1, sign=signature("recv", peer=0))
    assert not found(job, trigger=Trigger.CYCLE, seq_id=0)


def test_a_rank_stuck_inside_a_loop_that_others_passed_is_missing_and_not_uneven(tmp_path):
    p = Program(
        tmp_path, "def main():\n    for x in data:\n        lock.acquire()\n        dist.barrier()"
    )
    job = Job()
    job.every(p.site("dist.barrier"), "barrier")
    job.call(0, p.site("dist.barrier"), "barrier")
    job.set(1, stacks=stacks(1, p.frame("lock.acquire")))
    assert codes(job.alignment(trigger=Trigger.STALLED)) == ["COL001"]


@pytest.mark.parametrize(("line", "is_behind"), [("sleep", True), ("prepare", False)])
def test_the_condition_that_the_missing_rank_went_past_is_named(tmp_path, line, is_behind):
    text = "def main():\n    prepare()\n    if ok:\n        dist.all_reduce(x)\n    sleep()"
    p, job = Program(tmp_path, text), Job()
    job.call(0, p.site("all_reduce"))
    job.set(1, stacks=stacks(1, p.frame(line)))
    (finding,) = found(job, trigger=Trigger.STALLED)
    assert ("`if ok:`" in finding.fix) == is_behind
    assert (finding.location.line == 3) == is_behind
