# ruff: noqa: SIM115 (that files are left open is what is tested)
from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distdiag.events.collectives import Collective
from distdiag.events.files import FileAction, FileClosed, StoreCall
from distdiag.probes.files import log
from tests.probes.conftest import Observed


def touch(path: Path) -> None:
    with open(path, "wb"):
        pass


def test_a_write_ends_before_the_collective_that_follows_it(
    observed: Observed, folder: Path, fake_group: None
) -> None:
    observed.install("files", "collectives")

    touch(folder / "a")
    dist.all_reduce(torch.ones(1))

    (write,) = observed.accesses(folder)
    (end,) = observed.events(FileClosed)
    (call,) = observed.calls()
    assert write.seq < end.seq < call.seq


def test_after_a_wait_a_read_is_another_one(
    observed: Observed, folder: Path, fake_group: None
) -> None:
    observed.install("files", "collectives")
    touch(folder / "a")

    def read() -> None:
        open(folder / "a", "rb").close()

    work = dist.all_reduce(torch.ones(1), async_op=True)
    read()
    read()
    work.wait()
    read()

    assert observed.said(folder) == [("write", "a"), ("read", "a"), ("read", "a")]


def test_without_accesses_nothing_stands_before_a_collective(
    observed: Observed, fake_group: None
) -> None:
    observed.install("files", "collectives")
    dist.all_reduce(torch.ones(1))

    assert not observed.signals.before_sync.subscribers
    assert len(observed.events(Collective)) == 1


def test_a_flood_of_reads_is_cut_down_to_folders_of_this_run(
    observed: Observed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MOST_LOOKUPS", 3)
    (folder / "old").mkdir()
    for number in range(6):
        touch(folder / "old" / str(number))
    os.utime(folder / "old", (1, 1))
    observed.install("files")

    def read(name: str) -> None:
        open(folder / name, "rb").close()

    for number in range(6):
        read(f"old/{number}")
    touch(folder / "new")
    read("new")
    touch(folder / "old" / "6")
    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))
    read("old/6")

    reads = [a for a in observed.accesses(folder) if a.action is FileAction.READ]
    names = [str(Path(a.path).relative_to(folder)) for a in reads]
    assert names == ["old/0", "old/1", "old/2", "new", "old/6"]


def test_the_same_line_called_from_elsewhere_of_the_user_is_the_same_place(
    observed: Observed, folder: Path
) -> None:
    observed.install("files")

    def read() -> None:
        open(folder / "none", "rb")

    def one() -> None:
        with pytest.raises(FileNotFoundError):
            read()

    one()
    one()
    with pytest.raises(FileNotFoundError):
        open(folder / "none", "rb")

    assert len(observed.accesses(folder)) == 2


def test_threads_are_named(observed: Observed, folder: Path) -> None:
    observed.install("files")
    thread = threading.Thread(target=touch, args=(folder / "a",), name="writer")
    thread.start()
    thread.join()

    (write,) = observed.accesses(folder)
    assert write.thread == "writer"
    assert write.site.location is not None
    assert write.site.location.function == "touch"


def test_many_threads_at_once_lose_nothing(observed: Observed, folder: Path) -> None:
    observed.install("files")

    def work(name: str) -> None:
        for number in range(50):
            touch(folder / f"{name}-{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))

    writes = observed.accesses(folder)
    assert len({write.path for write in writes}) == len(writes) == 200
    ends = [end.access for end in observed.events(FileClosed)]
    assert sorted(ends) == sorted(write.seq for write in writes)
