from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("subprocess.py", "_wait"))
    assert_alone_and_right(job, "HNG013")


def test_a_pipe_without_a_name_leads_to_a_child(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "pipe:[4711]"))
    assert_alone_and_right(job, "HNG013")


def test_a_named_pipe_is_a_file(tmp_path):
    job = stuck_job(tmp_path, observed=kernel(1, "read", "/tmp/a.fifo"))
    assert_left_to(job, "HNG005")
