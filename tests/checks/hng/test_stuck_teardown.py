from distdiag.checks.hng.stuck_teardown import StuckTeardown
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.views.rank_states import Fate
from tests.checks.streams import Job, Program, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import findings


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    frame = library("torch/distributed/distributed_c10d.py", "destroy_process_group")
    assert_alone_and_right(stuck_job(tmp_path, frame), "HNG010")


def test_joining_a_thread_before_the_end_is_no_teardown(tmp_path):
    assert_left_to(stuck_job(tmp_path, library("threading.py", "join")), "HNG011")


def test_a_thread_that_keeps_the_process_alive_is_named_with_its_line(tmp_path):
    p = Program(tmp_path, "def watch():\n    sleep(1)")
    main = ThreadStack("MainThread", (library("threading.py", "_shutdown"),))
    other = ThreadStack("watcher", (p.frame("sleep"),))
    job = Job()
    job.set(0, fate=Fate.FINISHED)
    seen = Stacks(rank=1, seq=-1, time_ns=0, source="py-spy", threads=(main, other))
    job.set(1, idle_s=31.0, stacks=seen)
    (finding,) = findings(StuckTeardown, job.view())
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 2)
    assert any("its thread watcher" in each.summary for each in finding.evidence)
