"""Dumps in files: what they are called, and that they can be read again."""

import stat

import pytest

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.py_spy_json import PySpyJson
from distdiag.events.base import Frame
from distdiag.events.errors import UsageError
from distdiag.events.stacks import ThreadStack
from distdiag.live.job_dump import RankStacks, jobs_of, prepare, save
from distdiag.views.stack_tree import MAIN
from tests.live.test_job_dump import node, stacks, who

THREADS = (
    ThreadStack(MAIN, (Frame("/x/train.py", 57, "main"),), holds_gil=True, active=True),
    ThreadStack("thread 7", (Frame("/x/data.py", 3, "read"), Frame("/x/data.py", 9, "run"))),
)


def test_each_rank_has_a_file_that_reads_as_what_py_spy_writes(tmp_path):
    folder = tmp_path / "new" / "dumps"
    prepare(folder)
    (job,) = jobs_of([node(RankStacks(who=who(3, pid=42), threads=THREADS), stacks(1))])
    assert save([job], folder) == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-1.py-spy.json",
        "rank-3.py-spy.json",
    ]
    path = folder / "rank-3.py-spy.json"
    dump = Dump(path=str(path), data=path.read_bytes())
    assert PySpyJson().recognises(dump)
    (read,) = PySpyJson().read(dump)
    assert (read.pid, read.events[0].threads) == (42, THREADS)


def test_only_the_owner_can_read_the_files(tmp_path):
    folder = tmp_path / "dumps"
    prepare(folder)
    save(jobs_of([node(stacks(0))]), folder)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
    assert modes == [0o700, 0o600]


def test_a_rank_without_stacks_has_no_file(tmp_path):
    assert save(jobs_of([node(stacks(0), stacks(1, error="gone"))]), tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.py-spy.json"]


def test_several_jobs_have_a_folder_each_whatever_they_are_called(tmp_path):
    jobs = jobs_of([node(stacks(0), stacks(0, job="../../x"), stacks(1, job="../../x"))])
    assert save(jobs, tmp_path) == 3
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert names == [
        "job-______x/rank-0.py-spy.json",
        "job-______x/rank-1.py-spy.json",
        "job-node0_29500/rank-0.py-spy.json",
    ]


def test_a_folder_that_cannot_be_used_is_a_mistake_of_usage(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        prepare(tmp_path)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        prepare(tmp_path / "file" / "x")
    with pytest.raises(UsageError, match="cannot be written"):
        save(jobs_of([node(stacks(0))]), tmp_path / "file")
