"""A run with a finding of collectives becomes a test that shows it, and passes when corrected."""

import pytest

from distdiag.events.collectives import Signature
from distdiag.events.errors import UsageError
from distdiag.replay import replay_source
from distdiag.replay.source import statement
from distdiag.reports import write_report
from tests import forked
from tests.cli.test_cli import REPORT

SICK = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(2))
operator = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(3, dtype=torch.int64), op=operator)
dist.destroy_process_group()
"""


def call(folder, *words):
    return forked.run(["-m", *words], timeout=200, cwd=folder)


@pytest.mark.timeout(400)
def test_a_finding_is_shown_again_and_gone_when_it_is_corrected(tmp_path):
    (tmp_path / "train.py").write_text(SICK)
    call(tmp_path, "distdiag.cli", "check", "--run-dir", "run", "--report", "json", "train.py")
    written = call(tmp_path, "distdiag.cli", "report", "run", "--format", "pytest")
    assert "*(3 * [line_of_train_7])" in written.stdout, written
    sick = tmp_path / "test_replay.py"
    sick.write_text(written.stdout)
    pytest_words = ("pytest", "-p", "distdiag.pytest_plugin", "-p", "no:cacheprovider", sick.name)
    failed = call(tmp_path, *pytest_words)
    assert failed.returncode == 1
    assert "ERROR COL005 reduce-op-mismatch" in failed.stdout
    sick.write_text(written.stdout.replace("ReduceOp.MAX", "ReduceOp.SUM"))
    corrected = call(tmp_path, *pytest_words)
    assert corrected.returncode == 0, corrected.stdout


def test_a_report_without_such_a_finding_is_one_clear_error(tmp_path):
    write_report(tmp_path / "report.json", REPORT)
    with pytest.raises(UsageError, match="no finding of collectives"):
        replay_source(tmp_path)


@pytest.mark.parametrize(
    ("signature", "is_root", "line"),
    [
        (
            Signature("all_reduce", ((2,),), ((2,),), ("float32",), "AVG"),
            False,
            "dist.all_reduce(torch.zeros((2,), dtype=torch.float32), op=dist.ReduceOp.SUM, "
            "group=group)",
        ),
        (
            Signature("gather", ((1,),), ((1,), (1,), (1,)), ("int64",), root=1),
            True,
            "dist.gather(torch.zeros((1,), dtype=torch.int64), [torch.zeros((1,), "
            "dtype=torch.int64) for _ in range(3)], dst=1, group=group)",
        ),
        (
            Signature("gather", ((1,),), (), ("int64",), root=1),
            False,
            "dist.gather(torch.zeros((1,), dtype=torch.int64), None, dst=1, group=group)",
        ),
        (Signature("barrier"), False, "dist.barrier(group=group)"),
    ],
)
def test_a_call_is_written_as_its_function(signature, is_root, line):
    assert statement(signature, is_root=is_root) == line


def test_a_call_without_a_public_function_is_refused():
    with pytest.raises(UsageError, match="all_gather_into_tensor_coalesced"):
        statement(Signature("all_gather_into_tensor_coalesced"), is_root=False)


@pytest.mark.parametrize(
    "signature",
    [
        Signature("all_reduce", ((2,),), ((2,),), ("float32), exit(3",), "SUM"),
        Signature("all_reduce", ((2,),), ((2,),), ("float32",), "SUM, exit(3)"),
    ],
)
def test_no_text_of_a_record_becomes_code(signature):
    with pytest.raises(UsageError, match="cannot be replayed"):
        statement(signature, is_root=True)
