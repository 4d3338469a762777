from tests.checks.streams import library
from tests.checks.stuck_verdicts import assert_alone_and_right, assert_left_to, stuck_job


def test_a_rank_that_is_stuck_there_is_named_with_its_line(tmp_path):
    job = stuck_job(tmp_path, library("torch/utils/file_baton.py", "wait"))
    finding = assert_alone_and_right(job, "HNG008")
    assert "torch/utils/file_baton.py" in finding.message


def test_running_compiled_code_is_no_compilation(tmp_path):
    job = stuck_job(tmp_path, library("torch/_dynamo/eval_frame.py", "compile_wrapper"))
    assert_left_to(job, "COL001")
