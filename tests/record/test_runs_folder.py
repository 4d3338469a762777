"""Which runs stay in the folder of runs, and that nothing else there is touched."""

import os
import time

import pytest

from distdiag.record.run_dir import Launch, open_run_dir
from distdiag.record.runs_folder import RUNS_FOLDER, tidy


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / RUNS_FOLDER
    path.mkdir()
    return path


def run(folder, number, age_s=3600, pid=None):
    path = folder / f"20260101-12000{number}-{number}"
    (path / "attempt-0").mkdir(parents=True)
    (path / "run.json").write_text("x")
    if pid is not None:
        (path / "attempt-0" / "monitor.pid").write_text(str(pid))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def names(folder):
    return sorted(path.name[-1] for path in folder.iterdir() if path.name[0] == "2")


def test_the_newest_runs_stay(folder):
    for number in range(5):
        run(folder, number)
    tidy(folder, 3)
    assert names(folder) == ["2", "3", "4"]
    assert (folder / ".gitignore").read_text() == "*\n"


def test_a_run_that_goes_on_stays(folder):
    run(folder, 0, pid=os.getpid())
    run(folder, 1, age_s=1)
    run(folder, 2)
    run(folder, 3)
    tidy(folder, 1)
    assert names(folder) == ["0", "1", "3"]


def test_what_is_no_run_stays(folder):
    (folder / "mine").mkdir()
    (folder / "20260101-120000-1").mkdir()
    (folder / ".gitignore").write_text("mine")
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "run.json").write_text("x")
    (folder / "20260101-120000-2").symlink_to(elsewhere)
    run(folder, 3)
    tidy(folder, 1)
    assert len(list(folder.iterdir())) == 5
    assert (elsewhere / "run.json").exists()
    assert (folder / ".gitignore").read_text() == "mine"


def test_a_new_run_makes_room_and_one_with_a_directory_of_its_own_does_not(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for number in range(3):
        run(folder, number)
    launch = Launch(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        attempt=0,
        max_attempts=1,
        parent_pid=7,
        identity="here",
        started_s=time.time(),
    )
    open_run_dir(folder.parent / "own", launch, kept_runs=1)
    assert names(folder) == ["0", "1", "2"]
    open_run_dir(None, launch, kept_runs=2)
    assert names(folder) == ["2", "7"]
