from tests.checks.streams import library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("torch/distributed/rendezvous.py", "next_rendezvous"))
    assert_alone_and_right(job, "HNG009")


def test_another_function_of_the_same_file_is_no_initialisation(tmp_path):
    job = stuck_job(tmp_path, library("torch/distributed/distributed_c10d.py", "get_rank"))
    assert_left_to(job, "COL001")
