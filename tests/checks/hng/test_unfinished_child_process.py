import msgspec
import pytest

from distdiag.findings.finding import Severity
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import Help
from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job
from tests.checks.verdicts import all_findings, serious


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


def test_a_pool_whose_workers_used_the_processor_of_late_is_late(tmp_path):
    observed = with_child("sleeping in read of pipe:[9]")
    help_ = Help(seconds=15.0, children_cpu_s=14.0, num_children=8)
    job = stuck_job(tmp_path, *POOL, observed=observed, help=help_)
    (note,) = all_findings(job.alignment(trigger=Trigger.STALLED))
    assert (note.code, note.severity) == ("HNG013", Severity.INFO)
    assert "its 8 child processes used 14.0 s of processor time in the last 15 s" in note.message


ELSEWHERE = [
    ("torch/utils/file_baton.py", "wait", "HNG008"),
    ("filelock/_api.py", "acquire", "HNG011"),
    ("torch/distributed/distributed_c10d.py", "new_group", "HNG009"),
    ("torch/autograd/graph.py", "_engine_run_backward", "COL001"),
]


@pytest.mark.parametrize(("file", "function", "code"), ELSEWHERE)
def test_children_are_no_excuse_for_who_waits_for_somebody_else(tmp_path, file, function, code):
    help_ = Help(seconds=15.0, children_cpu_s=14.0, num_children=1)
    job = stuck_job(tmp_path, library(file, function), help=help_)
    assert_left_to(job, code)
