from tests.checks.streams import kernel, library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    finding = assert_alone_and_right(stuck_job(tmp_path, observed=kernel(1, state="T")), "HNG012")
    assert "by a signal" in finding.message


def test_a_prompt_that_nobody_answers_is_a_stop(tmp_path):
    job = stuck_job(tmp_path, library("pdb.py", "interaction"))
    assert_alone_and_right(job, "HNG012")


def test_a_process_that_sleeps_is_not_stopped(tmp_path):
    assert_left_to(stuck_job(tmp_path, observed=kernel(1, state="S")), "COL001")
