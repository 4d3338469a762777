from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("ssl.py", "read"), library("http/client.py", "getresponse"))
    assert_alone_and_right(job, "HNG014")


def test_a_file_is_no_network(tmp_path):
    assert_left_to(stuck_job(tmp_path, observed=kernel(1, "openat")), "HNG005")
