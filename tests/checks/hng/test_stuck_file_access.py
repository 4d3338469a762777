from distdiag.checks.hng.stuck_file_access import StuckFileAccess
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Trigger
from tests.checks.streams import Job, kernel
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import findings, serious


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "/mnt/data/shard-1.tar"))
    finding = assert_alone_and_right(job, "HNG005")
    assert "/mnt/data/shard-1.tar" in finding.message
    assert any(e.values.get("blocked_on") == "/mnt/data/shard-1.tar" for e in finding.evidence)


def test_uninterruptible_sleep_is_a_file_system(tmp_path):
    assert_alone_and_right(stuck_job(tmp_path, observed=kernel(1, state="D")), "HNG005")


def test_a_rank_that_works_passes_through_system_calls(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "/data/x"), is_working=True)
    assert not serious(job.alignment(trigger=Trigger.STALLED))


def test_a_lock_is_no_file(tmp_path):
    assert_left_to(stuck_job(tmp_path, observed=kernel(1, "futex")), "HNG011")


def test_of_two_ranks_in_no_call_the_one_that_runs_is_not_accused():
    job = Job()
    job.set(0, idle_s=31.0, observed=kernel(0, state="R"))
    job.set(1, idle_s=31.0, observed=kernel(1, "flock", "/data/lock"))
    (finding,) = findings(StuckFileAccess, job.view())
    assert finding.ranks == RankSet([1])
