from tests.checks.streams import library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    frame = library("torch/distributed/distributed_c10d.py", "destroy_process_group")
    assert_alone_and_right(stuck_job(tmp_path, frame), "HNG010")


def test_joining_a_thread_before_the_end_is_no_teardown(tmp_path):
    assert_left_to(stuck_job(tmp_path, library("threading.py", "join")), "HNG011")
