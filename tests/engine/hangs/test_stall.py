"""What is a hang, what is none, when it is reported, and when it is taken back."""

import pytest

from distdiag.events.base import Frame, Phase
from distdiag.findings.finding import Grade, Severity
from tests.engine.stream import Job


def frames(file, function, line=12):
    """The stack of a rank in a library's function, called at a line of its script."""
    library = Frame(f"/usr/lib/python3/site-packages/{file}", 1, function, user=False)
    return (library, Frame("train.py", line, "main"))


POOL = frames("concurrent/futures/_base.py", "result")
BATON = frames("torch/utils/file_baton.py", "wait")


def waiting_job(**options):
    """Rank 1 is elsewhere, and rank 0 waits for it in a collective."""
    job = Job(**options)
    job.everyone(line=10)
    job.call(0, line=14, waited=False)
    return job


# Children that work


@pytest.mark.parametrize("hang_timeout_s", [5.0, 15.0, None])
def test_a_rank_whose_children_work_is_not_stuck(hang_timeout_s):
    job = waiting_job(hang_timeout_s=hang_timeout_s)
    job.passes(400, children={1: 1.6}, at={1: POOL})
    assert job.codes == []
    assert not job.engine.is_hung
    (note,) = job.engine.findings
    assert note.code == "HNG011"
    assert "its 2 child processes used" in note.message


def test_all_ranks_whose_children_work_are_not_stuck():
    job = Job(hang_timeout_s=5.0)
    job.passes(100, children={0: 0.5, 1: 0.5}, at={0: POOL, 1: POOL})
    assert job.codes == []
    assert not job.engine.is_hung


def test_children_that_only_poll_are_no_excuse():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(9, children={1: 0.02}, at={1: POOL})
    assert job.codes == ["HNG011"]
    assert job.engine.is_hung


def test_children_that_stop_working_leave_a_stuck_rank_however_late():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(60, children={1: 1.0}, at={1: POOL})
    assert not job.engine.is_hung
    job.passes(10, children={1: 0.0}, at={1: POOL})
    assert job.codes == ["HNG011"]
    assert job.engine.is_hung


def test_children_of_a_rank_that_waits_in_a_collective_are_no_excuse():
    job = waiting_job(hang_timeout_s=5.0)
    job.call(1, line=15, group=(1, 0), waited=False)
    job.passes(8, children={0: 1.0, 1: 1.0})
    assert job.engine.is_hung


INDUCTOR = frames("torch/_inductor/async_compile.py", "wait")
DYNAMO = frames("torch/_dynamo/convert_frame.py", "__call__")
NVCC = frames("torch/utils/cpp_extension.py", "_run_ninja_build")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one waits for it", "all compile"])
@pytest.mark.parametrize(
    ("who", "stack"),
    [("children", INDUCTOR), ("cpu", DYNAMO), ("children", NVCC)],
    ids=["compile workers", "the main thread", "a compiler"],
)
def test_a_compilation_of_two_minutes_is_no_hang(who, stack, ranks):
    job = waiting_job(hang_timeout_s=15.0) if ranks == (1,) else Job(hang_timeout_s=15.0)
    job.passes(125, **{who: dict.fromkeys(ranks, 0.9)}, at=dict.fromkeys(ranks, stack))
    assert job.codes == []
    assert not job.engine.is_hung


@pytest.mark.parametrize("others", [BATON, NVCC], ids=["the lock of the build", "a build"])
def test_who_waits_for_the_build_of_another_rank_is_no_hang_as_long_as_that_builds(others):
    job = Job(hang_timeout_s=15.0)
    job.passes(125, children={0: 0.9}, at={0: NVCC, 1: others})
    assert job.codes == []
    assert not job.engine.is_hung
    job.passes(20, at={0: BATON, 1: others})
    assert job.codes == ["HNG008"]
    assert job.engine.is_hung


def test_a_child_that_spins_hides_a_lock_file_for_a_while_only():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(25, children={1: 1.0}, at={1: BATON})
    assert job.codes == []
    job.passes(10, children={1: 1.0}, at={1: BATON})
    assert job.codes == ["HNG008"]
    assert job.engine.is_hung


def test_children_that_work_for_longer_than_any_group_waits_excuse_nothing():
    job = waiting_job(hang_timeout_s=30.0)
    job.passes(1790, children={1: 1.0}, at={1: POOL})
    assert not job.engine.is_hung
    job.passes(60, children={1: 1.0}, at={1: POOL})
    assert job.engine.is_hung


def test_a_rank_that_reads_or_writes_works():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(29, io={1: 1 << 20})
    assert not job.engine.is_hung
    job.passes(10, io={1: 1000})
    assert job.engine.is_hung


def test_what_a_rank_computed_long_ago_is_no_excuse():
    job = waiting_job(hang_timeout_s=10.0)
    job.passes(30, cpu={1: 1.0})
    assert job.codes == []
    job.passes(15, cpu={1: 0.0})
    assert job.engine.is_hung


def test_a_rank_that_polls_is_found_however_it_was_at_the_first_look():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(8, at={1: BATON}, ready=(1,))
    assert not job.engine.is_hung
    job.passes(6, at={1: BATON})
    assert job.codes == ["HNG008"]
    assert job.engine.is_hung


def test_a_rank_that_gets_no_processor_is_looked_at_ever_more_rarely():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(200, ready=(1,))
    assert job.codes == []
    assert not job.engine.is_hung
    # Behind 5 s of the stall, then 5, 10, 20, 40 and 80 s later.
    assert job.num_dumps == {0: 6, 1: 6}


def test_a_late_rank_is_no_hang_because_of_another_finding():
    job = Job(hang_timeout_s=5.0)
    job.everyone(line=10)
    job.call(0, line=11, dtype="float32")
    job.call(1, line=11, dtype="int32")
    assert job.codes == ["COL004"]
    job.call(0, line=14, waited=False)
    job.passes(50, cpu={1: 1.0})
    assert not job.engine.is_hung


# Before the first collective


@pytest.mark.parametrize(("hang_timeout_s", "none_s", "hung_s"), [(15.0, 14, 4), (None, 290, 15)])
def test_ranks_that_all_stand_before_the_first_collective_are_reported(
    hang_timeout_s, none_s, hung_s
):
    job = Job(hang_timeout_s=hang_timeout_s)
    job.passes(none_s, cpu={0: 0.01, 1: 0.01}, at={0: BATON, 1: BATON})
    assert job.codes == []
    job.passes(hung_s, cpu={0: 0.01, 1: 0.01}, at={0: BATON, 1: BATON})
    assert job.codes == ["HNG008"]
    assert job.engine.is_hung


@pytest.mark.parametrize("use", [{"cpu": {0: 0.5}}, {"io": {1: 1 << 20}}, {"children": {1: 0.3}}])
def test_one_rank_that_prepares_something_before_the_first_collective_is_enough(use):
    job = Job(hang_timeout_s=15.0)
    job.passes(80, **use)
    assert job.codes == []
    assert not job.engine.is_hung


def test_a_single_process_may_wait_for_requests():
    job = Job(num_ranks=1, hang_timeout_s=None)
    job.passes(1000)
    assert job.codes == []


# Proofs


@pytest.mark.parametrize("hang_timeout_s", [5.0, None])
@pytest.mark.parametrize(
    "unlike",
    [{"op": "barrier"}, {"op": "broadcast"}, {"size": 7}],
    ids=["barrier", "broadcast", "size"],
)
def test_calls_that_cannot_end_are_a_hang_at_once(hang_timeout_s, unlike):
    job = Job(hang_timeout_s=hang_timeout_s)
    job.everyone(line=10)
    job.call(0, line=11, waited=False)
    job.call(1, **({"op": "all_reduce"} | unlike), line=12, waited=False)
    job.passes(1)
    assert not job.engine.is_hung
    job.passes(1.5)
    assert job.engine.is_hung
    assert len(job.codes) == 1


def test_two_roots_that_wait_are_a_hang_at_once():
    job = Job(hang_timeout_s=None)
    job.call(0, "broadcast", 11, root=0, waited=False)
    job.call(1, "broadcast", 11, root=1, waited=False)
    job.passes(2.5)
    assert job.engine.is_hung


@pytest.mark.parametrize("first", [{"waited": True}, {"is_async": True, "waited": False}])
def test_a_rank_that_went_on_from_an_unlike_call_does_not_hang(first):
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    job.call(0, "barrier", 11, **first)
    job.call(1, "all_reduce", 12, waited=False)
    job.passes(20)
    assert not job.engine.is_hung


def test_a_backward_pass_waits_for_the_calls_of_its_reducer():
    job = Job(hang_timeout_s=None)
    job.everyone(line=10)
    job.beat(0, phase=Phase.BACKWARD)
    job.call(0, "all_reduce", 11, is_async=True, waited=False)
    job.call(1, "barrier", 12, waited=False)
    job.passes(2.5)
    assert job.engine.is_hung


def test_unlike_calls_that_may_end_have_their_time():
    job = Job(hang_timeout_s=None)
    for rank, dtype in enumerate(("float32", "int32")):
        job.call(rank, line=11, dtype=dtype, waited=False)
    job.passes(20)
    assert job.codes == ["COL004"]
    assert not job.engine.is_hung


def test_a_circle_is_a_hang_at_once():
    job = Job(num_ranks=3, hang_timeout_s=None)
    job.everyone(line=10)
    job.call(0, line=20, group=(0, 1), waited=False)
    job.call(1, line=30, waited=False)
    job.call(2, line=30, waited=False)
    job.passes(4)
    assert job.codes == ["COL001"]
    assert job.engine.is_hung


# Taking back


def assert_taken_back(job, code):
    assert job.codes == []
    assert not job.engine.is_hung
    (note,) = [finding for finding in job.engine.findings if finding.code == code]
    assert (note.severity, note.grade) == (Severity.INFO, Grade.NOTE)
    assert "slow, not stuck" in note.message


@pytest.mark.parametrize(("hang_timeout_s", "stall_s"), [(5.0, 8), (None, 45)])
def test_a_run_that_finishes_after_a_stall_had_no_hang(hang_timeout_s, stall_s):
    job = waiting_job(hang_timeout_s=hang_timeout_s)
    job.passes(stall_s)
    assert job.codes == ["COL001"]
    job.call(1, line=14)
    job.finishes(0)
    job.finishes(1)
    job.engine.finish()
    assert_taken_back(job, "COL001")


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_run_that_finishes_after_it_stood_in_no_call_had_no_hang(ticks):
    job = Job(hang_timeout_s=5.0)
    job.everyone(line=10)
    job.passes(8, at={0: POOL, 1: POOL})
    assert job.codes == ["HNG011"]
    job.finishes(0)
    job.finishes(1)
    job.passes(ticks)
    job.engine.finish()
    assert_taken_back(job, "HNG011")


def test_a_rank_that_comes_late_and_then_fails_was_not_stuck_before():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(8)
    job.call(1, line=14)
    job.raises(1, line=30)
    job.passes(1)
    assert job.codes == ["HNG001"]


def test_a_hang_that_somebody_ended_stays():
    job = waiting_job(hang_timeout_s=5.0)
    call = job.call(0, line=16, group=(0,), waited=False)
    job.passes(8)
    job.state(call, "failed")
    job.passes(1)
    job.raises(0, message="timed out")
    job.dies(1)
    job.passes(1)
    job.engine.finish()
    assert "COL001" in job.codes


def test_a_rank_that_finishes_without_the_call_is_missed():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(8)
    job.finishes(1)
    job.passes(1)
    job.dies(0)
    job.engine.finish()
    assert any(code.startswith("COL") for code in job.codes)


def test_a_stall_that_ended_may_come_again():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(8)
    job.beat(1, batches=1)
    job.passes(1, cpu={1: 0.0})
    assert_taken_back(job, "COL001")
    assert [note.code for note in job.engine.take_withdrawn()] == ["COL001"]
    job.passes(8, cpu={1: 0.0})
    assert job.codes == ["COL001"]
    assert "slow" not in job.alarms[0].message
    assert job.engine.is_hung


def test_a_hang_that_nobody_ended_stays_when_the_watch_ends():
    job = waiting_job(hang_timeout_s=5.0)
    job.passes(8)
    job.engine.finish()
    assert job.codes == ["COL001"]
    assert job.engine.is_hung


# Keys of the store

AT_LINE_12 = (Frame("train.py", 12, "main"),)


def test_a_rank_that_waits_for_a_key_says_which_and_who_set_one_like_it():
    job = waiting_job()
    job.sets(0, "step/4")
    job.asks(1, "step/5")
    job.passes(8, at={1: AT_LINE_12})
    (finding,) = job.alarms
    assert finding.code == "HNG020"
    assert 'the key "step/5" of the store s, which no rank has set; rank 0 set "step/4" at ' in (
        finding.message
    )


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_rank_that_has_its_key_or_whose_thread_waits_for_one_waits_for_something_else(
    is_answered,
):
    job = waiting_job()
    if is_answered:
        job.asks(1, "step/5")
        job.gets(1, "step/5")
    else:
        job.asks(1, "step/5", thread="reader")
    job.passes(8, at={1: AT_LINE_12})
    assert job.codes == ["COL001"]
