from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    assert_alone_and_right(stuck_job(tmp_path, library("queue.py", "get")), "HNG011")


def test_a_lock_in_c_is_seen_by_its_system_call(tmp_path):
    assert_alone_and_right(stuck_job(tmp_path, observed=kernel(1, "futex")), "HNG011")


def test_the_queue_of_a_data_loader_belongs_to_the_data_loader(tmp_path):
    inner = library("queue.py", "get"), library("torch/utils/data/dataloader.py", "_get_data")
    assert_left_to(stuck_job(tmp_path, *inner), "HNG004")
