"""The same promises over NCCL, on two GPUs: silence, identity, and the right rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.launch import run_checked, run_plain

HERE = Path(__file__).parent
OPTIONS = ("--hang-timeout", "8", "--on-hang", "abort")

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(240),
]


def line_of(script: str, text: str) -> int:
    lines = (HERE / script).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp", "exchange", "compile"])
def test_correct_training_is_silent_and_bit_identical(kind):
    checked = run_checked(HERE / "training.py", ["--kind", kind])
    assert checked.exit_status == 0, checked.describe()
    assert checked.report is not None, checked.describe()
    assert checked.report["complete"], checked.describe()
    assert checked.report["run"]["outcome"] == "finished", checked.describe()
    assert not checked.alarms, checked.describe()
    if kind == "compile":
        return  # Inductor picks its kernels by timing them: two plain runs can differ as well
    plain = run_plain(HERE / "training.py", ["--kind", kind])
    losses = [re.findall("^losses .*$", run.stdout, re.M) for run in (plain, checked)]
    assert losses[0]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["item", "print", "mask", "synchronize", "barrier"])
def test_a_file_that_is_read_after_the_host_has_waited_is_silent(kind, tmp_path):
    run = run_checked(HERE / "handover.py", ["--wait", kind, "--folder", str(tmp_path)])
    assert run.exit_status == 0, run.describe()
    assert not run.alarms, run.describe()


def test_a_file_that_is_read_while_only_the_stream_waits_is_named(tmp_path):
    run = run_checked(HERE / "handover.py", ["--wait", "none", "--folder", str(tmp_path)])
    (found,) = [f for f in run.alarms if f["code"] == "BAR007"]
    assert found["ranks"] == [1], run.describe()
    assert "only the stream waits" in found["message"], run.describe()
    assert found["location"]["line"] == line_of("handover.py", "path.read_text()")


@pytest.mark.parametrize(
    ("kind", "codes", "ranks", "text"),
    [
        ("guarded", {"COL009"}, [0], 'if kind == "guarded"'),
        ("dtype", {"COL004"}, [0, 1], "dist.all_reduce(shown)"),
        ("early", {"COL011", "COL002", "COL001"}, [1], "dist.all_reduce(total)"),
        ("raise", {"HNG001"}, [1], "raise ValueError"),
    ],
)
def test_what_goes_wrong_is_named(kind, codes, ranks, text):
    run = run_checked(HERE / "stuck.py", ["--kind", kind], options=OPTIONS)
    assert run.report is not None, run.describe()
    assert not run.leftovers, run.describe()
    found = [f for f in run.alarms if f["code"] in codes]
    assert found, run.describe()
    assert found[0]["ranks"] == ranks, run.describe()
    lines = [found[0]["location"]["line"]] if found[0]["location"] else []
    lines += [e["location"]["line"] for e in found[0]["evidence"] if e["location"]]
    assert line_of("stuck.py", text) in lines, run.describe()
