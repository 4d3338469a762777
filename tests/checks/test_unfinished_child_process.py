import msgspec

from distdiag.alignment import Trigger
from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import serious


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("subprocess.py", "_wait"))
    assert_alone_and_right(job, "HNG013")


def test_a_pipe_without_a_name_leads_to_a_child(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "pipe:[4711]"))
    assert_alone_and_right(job, "HNG013")


def test_a_named_pipe_is_a_file(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "/tmp/a.fifo"))
    assert_left_to(job, "HNG005")


POOL = library("threading.py", "wait"), library("multiprocessing/pool.py", "get")


def with_child(doing):
    seen = kernel(1, "futex")["kernel"]
    values = seen.values | {"num_children": 1, "child 77": f"python: {doing}"}
    return {"kernel": msgspec.structs.replace(seen, values=values)}


def test_a_pool_whose_workers_sleep_is_stuck_however_busy_its_threads_are(tmp_path):
    observed = with_child("sleeping in read of pipe:[9]")
    job = stuck_job(tmp_path, *POOL, observed=observed, is_working=True)
    assert_alone_and_right(job, "HNG013")


def test_a_pool_whose_workers_run_is_late(tmp_path):
    job = stuck_job(tmp_path, *POOL, observed=with_child("running"))
    assert not serious(job.alignment(trigger=Trigger.STALLED))
