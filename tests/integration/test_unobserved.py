"""A rank whose agent cannot start: nobody is accused, nothing is killed, the report says why."""

import os
import subprocess

import msgspec
import pytest

from tests.integration.launch import run_checked

pytestmark = pytest.mark.timeout(300)

SLOW = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(2))
    if step == 1 and dist.get_rank() == {slow}:
        time.sleep(5)
print("done")
dist.destroy_process_group()
"""
ABORT = ("--hang-timeout", "2", "--on-hang", "abort")


def run(folder, *, slow):
    script = folder.parent / "train.py"
    script.write_text(SLOW.format(slow=slow))
    outcome = run_checked(script, options=["--run-dir", str(folder), *ABORT])
    path = folder / "report.json"
    return outcome, msgspec.json.decode(path.read_bytes()) if path.exists() else None


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-{}.000000.events", 1),
        ("rank-{}.status", 0),
        pytest.param("rank-{}.000000.events", 0, marks=pytest.mark.slow),
        pytest.param("rank-{}.status", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_without_an_agent_is_neither_accused_nor_a_reason_to_abort(tmp_path, name, rank):
    folder = tmp_path / "run"
    (folder / "attempt-0").mkdir(parents=True)
    (folder / "attempt-0" / name.format(rank)).write_text("somebody else's")

    outcome, report = run(folder, slow=rank)

    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("done") == 2
    assert outcome.leftovers == ()
    assert "NOT JUDGED" not in outcome.stderr
    assert report["complete"], outcome.describe()
    assert report["run"]["outcome"] == "finished"
    assert [f["code"] for f in report["findings"]] == ["DIA003"], outcome.describe()
    assert report["silent_ranks"] == [rank]
    assert "could not start: FileExistsError" in report["not_checked"][f"rank {rank}"]
    statuses = {info["rank"]: info["fate"] for info in report["run"]["ranks"]}
    assert statuses == {rank: "silent", 1 - rank: "finished"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize(
    "size",
    [
        "1200k",
        pytest.param("4k", marks=pytest.mark.slow),
        pytest.param("64k", marks=pytest.mark.slow),
    ],
)
def test_a_disk_too_small_for_all_ranks_ends_no_run(tmp_path, size):
    folder = tmp_path / "run"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted")
    try:
        outcome, report = run(folder, slow=1)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.stdout.count("done") == 2
    assert outcome.leftovers == ()
    assert "runs unobserved" in outcome.stderr
    loud = [f for f in report["findings"] if f["severity"] != "info"] if report else []
    assert {f["code"] for f in loud} <= {"DIA002"}, outcome.describe()
