from distdiag.checks.hng.parted_stacks import PartedStacks
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from distdiag.views.rank_states import RankStatus, StackView
from tests.checks.streams import TORCH, Job, Program, library, stacks
from tests.checks.verdicts import findings

SOURCE = "def main():\n    evaluate()\n    dist.all_reduce(loss)\n    dist.barrier()"


def seen(tmp_path, *stacks_by_rank):
    """A job of which only stacks are known; each rank stands at a line, inside these frames."""
    p = Program(tmp_path, SOURCE)
    job = Job(len(stacks_by_rank))
    for rank, (text, *inner) in enumerate(stacks_by_rank):
        job.set(rank, status=RankStatus.SILENT, stacks=stacks(rank, *inner, p.frame(text)))
    return findings(PartedStacks, StackView(job.view().states))


def test_the_rank_that_is_in_no_collective_is_named_with_its_line(tmp_path):
    (finding,) = seen(tmp_path, ("all_reduce", TORCH), ("evaluate",), ("all_reduce", TORCH))
    assert (finding.ranks, finding.location.line, finding.grade) == (RankSet([1]), 2, Grade.LIKELY)
    assert "all_reduce" in finding.message


def test_what_it_does_there_is_said_if_the_stack_tells(tmp_path):
    inner = library("torch/utils/data/dataloader.py", "_get_data")
    (finding,) = seen(tmp_path, ("all_reduce", TORCH), ("evaluate", inner))
    assert "data-loader" in finding.message


def test_the_fewer_that_are_in_another_call_are_named(tmp_path):
    barrier = library("torch/distributed/distributed_c10d.py", "barrier")
    places = [("all_reduce", TORCH), ("barrier()", barrier), ("all_reduce", TORCH)]
    (finding,) = seen(tmp_path, *places)
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 4)


def test_two_ranks_in_different_calls_are_both_named(tmp_path):
    barrier = library("torch/distributed/distributed_c10d.py", "barrier")
    (finding,) = seen(tmp_path, ("all_reduce", TORCH), ("barrier()", barrier))
    assert finding.ranks == RankSet([0, 1])


def test_ranks_in_one_call_or_in_none_are_silent(tmp_path):
    assert not seen(tmp_path, ("all_reduce", TORCH), ("all_reduce", TORCH))
    assert not seen(tmp_path, ("evaluate",), ("evaluate",))


def test_where_records_were_read_the_other_checks_judge(tmp_path):
    p = Program(tmp_path, SOURCE)
    job = Job()
    job.set(0, stacks=stacks(0, TORCH, p.frame("all_reduce")))
    job.set(1, stacks=stacks(1, p.frame("evaluate")))
    assert not findings(PartedStacks, StackView(job.view().states))


def test_a_known_fault_on_the_odd_stack_is_explained(tmp_path):
    inner = library("torch/utils/file_baton.py", "wait")
    (finding,) = seen(tmp_path, ("all_reduce", TORCH), ("evaluate", inner), ("all_reduce", TORCH))
    assert "lock file of a just-in-time build" in finding.why


def test_who_waits_for_its_gpu_is_no_culprit(tmp_path):
    wait = library("torch/cuda/streams.py", "synchronize")
    (finding,) = seen(tmp_path, ("all_reduce", TORCH), ("evaluate", wait), ("evaluate", wait))
    assert (finding.ranks, finding.grade) == (RankSet(), Grade.NOTE)
    places = [("all_reduce", TORCH), ("evaluate", wait), ("dist.barrier()",), ("evaluate", wait)]
    (finding,) = seen(tmp_path, *places)
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.LIKELY)
    assert not seen(tmp_path, ("evaluate", wait), ("evaluate", wait))
