from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from distdiag.events.files import FileAction, FileClosed, StoreCall
from tests.probes.conftest import Observed

LOCKS = (FileAction.LOCK, FileAction.UNLOCK)


@pytest.fixture(autouse=True)
def _installed(observed: Observed) -> None:
    observed.install("files")


def locks(observed: Observed, folder: Path) -> list[str]:
    """Return what was done about the lock, and what was done under it."""
    names = {"l": "", "data": " data"}
    return [
        f"{action}{names[name]}"
        for action, name in observed.said(folder)
        if name != "l" or action in ("lock", "unlock")
    ]


def test_a_lock_is_taken_and_given_back(observed: Observed, folder: Path) -> None:
    with open(folder / "l", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "data").write_text("x")
        fcntl.flock(file, fcntl.LOCK_UN)
        (folder / "data").write_text("x")

    assert locks(observed, folder) == ["lock", "write data", "unlock", "write data"]


def test_a_lock_ends_when_its_file_is_gone(observed: Observed, folder: Path) -> None:
    def work() -> None:
        with open(folder / "l", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "data").write_text("x")

    work()

    assert locks(observed, folder) == ["lock", "write data", "unlock"]


def test_a_lock_ends_when_its_descriptor_is_closed(observed: Observed, folder: Path) -> None:
    descriptor = os.open(folder / "l", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.close(descriptor)
    (folder / "data").write_text("x")

    assert locks(observed, folder) == ["lock", "unlock", "write data"]


def test_what_was_written_under_a_lock_ends_before_it(observed: Observed, folder: Path) -> None:
    with open(folder / "l", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(folder / "data", "wb"):
            pass
        fcntl.flock(lock, fcntl.LOCK_UN)

    accesses = {a.action: a for a in observed.accesses(folder) if not a.path.endswith("/l")}
    (unlock,) = [a for a in observed.accesses(folder) if a.action is FileAction.UNLOCK]
    ends = [e.seq for e in observed.events(FileClosed) if e.access == accesses["write"].seq]
    assert ends[0] < unlock.seq


def test_a_lock_that_somebody_else_has_is_not_taken(observed: Observed, folder: Path) -> None:
    with open(folder / "l", "w") as mine, open(folder / "l", "w") as theirs:
        fcntl.flock(mine, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)

    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))
    assert locks(observed, folder) == ["lock", "unlock"]


def test_a_lock_taken_twice_is_one_section(observed: Observed, folder: Path) -> None:
    with open(folder / "l", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.flock(file, fcntl.LOCK_UN)

    assert locks(observed, folder) == ["lock", "unlock"]


def test_the_library_that_everybody_uses(observed: Observed, folder: Path) -> None:
    lock = FileLock(folder / "l")
    for _ in range(2):
        with lock:
            (folder / "data").write_text("x")

    assert locks(observed, folder) == ["lock", "write data", "unlock"] * 2
    with lock, pytest.raises(Timeout):
        FileLock(folder / "l", timeout=0.01, is_singleton=False).acquire()


def test_a_lock_of_the_process_is_not_lost_to_a_look_at_the_file(
    observed: Observed, folder: Path
) -> None:
    with open(folder / "l", "w"):
        pass
    with open(folder / "l") as file:
        pass
    with open(folder / "l", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))
        pid = os.fork()
        if pid == 0:
            try:
                with open(folder / "l", "r+") as other:
                    fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0

    assert FileAction.LOCK in [a.action for a in observed.accesses(folder)]


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(TypeError):
        fcntl.flock()
    with pytest.raises(ValueError, match="file descriptor"):
        fcntl.flock(-1, fcntl.LOCK_EX)
    with pytest.raises(TypeError):
        fcntl.lockf("a", fcntl.LOCK_EX)
