# ruff: noqa: SIM115 (that files are left open is what is tested)
from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import tempfile
import weakref
from pathlib import Path

import pytest

from distdiag.events.files import FileAccess, FileAction, StoreCall
from distdiag.events.lifecycle import StepEnd
from distdiag.probes.files.opens import mode_of, mode_of_flags
from tests.probes.conftest import Observed


@pytest.fixture(autouse=True)
def _installed(observed: Observed, folder: Path) -> None:
    observed.install("files")


def sync(observed: Observed) -> None:
    """Write an event that orders what was done before."""
    observed.recorder.event(StoreCall, action="set", store="s", keys=("k",))


@pytest.mark.parametrize(
    ("mode", "action", "is_exclusive"),
    [
        ("r", FileAction.READ, False),
        ("rb", FileAction.READ, False),
        ("w", FileAction.WRITE, False),
        ("wb+", FileAction.WRITE, False),
        ("r+", FileAction.WRITE, False),
        ("x", FileAction.WRITE, True),
        ("a", FileAction.APPEND, False),
        ("ab+", FileAction.APPEND, False),
    ],
)
def test_a_mode_says_what_is_done(mode: str, action: FileAction, is_exclusive: bool) -> None:
    assert mode_of(mode)[:2] == (action, is_exclusive)


@pytest.mark.parametrize(
    ("flags", "action", "is_exclusive"),
    [
        (os.O_RDONLY, FileAction.READ, False),
        (os.O_WRONLY | os.O_CREAT, FileAction.WRITE, False),
        (os.O_RDWR, FileAction.WRITE, False),
        (os.O_WRONLY | os.O_APPEND, FileAction.APPEND, False),
        (os.O_WRONLY | os.O_CREAT | os.O_EXCL, FileAction.WRITE, True),
        (os.O_CREAT | os.O_EXCL, FileAction.WRITE, True),
    ],
)
def test_flags_say_what_is_done(flags: int, action: FileAction, is_exclusive: bool) -> None:
    mode = mode_of_flags(flags)
    assert mode is not None
    assert mode[:2] == (action, is_exclusive)


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_DIRECTORY, os.O_TMPFILE | os.O_RDWR])
def test_what_opens_no_content_is_no_access(flags: int) -> None:
    assert mode_of_flags(flags) is None


def test_a_file_is_written_read_and_closed(observed: Observed, folder: Path) -> None:
    path = folder / "a.txt"

    with open(path, "w", encoding="utf-8") as file:
        file.write("text")
    sync(observed)
    open(path, "rb").close()

    write, read = observed.accesses(folder)
    assert (write.action, write.has_end, write.api) == (FileAction.WRITE, True, "open")
    assert (read.action, read.has_end) == (FileAction.READ, False)
    assert write.site.location is not None
    assert write.site.location.file == __file__
    assert write.site.location.function == "test_a_file_is_written_read_and_closed"
    end = observed.end(write)
    assert end is not None
    assert end.content is not None
    assert end.content.size == 4


def test_the_end_of_a_write_comes_before_what_may_order_it(
    observed: Observed, folder: Path
) -> None:
    file = open(folder / "a.txt", "w", encoding="utf-8")
    sync(observed)
    (write,) = observed.accesses(folder)
    assert observed.end(write) is None

    file.close()
    observed.recorder.event(StepEnd, duration_s=1.0)  # orders nothing
    assert observed.end(write) is None
    sync(observed)

    end = observed.end(write)
    assert end is not None
    assert end.seq == observed.events(StoreCall)[-1].seq - 1


def test_the_end_of_a_write_comes_before_the_next_file_is_made(
    observed: Observed, folder: Path
) -> None:
    for name in ("data", "done"):
        with open(folder / name, "wb"):
            pass

    data, done = observed.accesses(folder)
    end = observed.end(data)
    assert end is not None
    assert data.seq < end.seq < done.seq


def test_a_mapping_goes_on_after_its_file_was_closed(observed: Observed, folder: Path) -> None:
    (folder / "a.bin").write_bytes(bytes(100))
    with open(folder / "a.bin", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    sync(observed)
    write = observed.accesses(folder)[-1]
    assert observed.end(write) is None

    memory.close()
    sync(observed)

    assert observed.end(write) is not None


def test_a_descriptor_is_followed_until_it_is_closed(observed: Observed, folder: Path) -> None:
    descriptor = os.open(folder / "a.bin", os.O_WRONLY | os.O_CREAT)
    sync(observed)
    (write,) = observed.accesses(folder)
    assert write.api == "os.open"
    assert observed.end(write) is None

    os.close(descriptor)
    other = os.open(__file__, os.O_RDONLY)  # most probably under the same number
    sync(observed)
    os.close(other)

    assert observed.end(write) is not None


def test_the_same_from_the_same_line_is_written_once_between_two_events(
    observed: Observed, folder: Path
) -> None:
    (folder / "a.txt").touch()

    def read() -> None:
        open(folder / "a.txt", "rb").close()

    for _ in range(3):
        read()
    sync(observed)
    read()

    assert observed.said(folder)[1:] == [("read", "a.txt")] * 2


def test_an_attempt_that_failed_is_written_once_and_its_success_again(
    observed: Observed, folder: Path
) -> None:
    path = folder / "late.txt"

    def poll() -> bool:
        try:
            open(path, encoding="utf-8").close()
        except FileNotFoundError:
            return False
        return True

    assert [poll(), poll(), poll()] == [False] * 3
    path.write_text("now")
    assert poll()

    first, write, second = observed.accesses(folder)
    end = observed.end(first)
    assert end is not None
    assert end.error.startswith("FileNotFoundError: ")
    assert [first.action, write.action, second.action] == ["read", "write", "read"]
    assert observed.end(second) is None
    assert first.site == second.site


def test_an_exclusive_creation_that_lost_says_so(observed: Observed, folder: Path) -> None:
    path = folder / "lock"
    open(path, "x").close()

    with pytest.raises(FileExistsError):
        open(path, "x")

    won, lost = observed.accesses(folder)
    assert won.is_exclusive
    assert lost.is_exclusive
    end = observed.end(lost)
    assert end is not None
    assert end.error.startswith("FileExistsError")


def test_a_file_with_a_temporary_name_is_not_mistaken_for_its_folder(
    observed: Observed, folder: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder):
        pass

    assert folder not in {Path(access.path) for access in observed.events(FileAccess)}


def test_a_pipe_has_no_content_and_no_open_end(observed: Observed, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    with open(folder / "pipe", "wb") as file:
        file.write(b"x")
    os.close(reader)

    write = observed.accesses(folder)[-1]
    end = observed.end(write)
    assert end is not None
    assert end.content is None


def test_nothing_changes_for_the_program(folder: Path) -> None:
    assert open is io.open
    assert pickle.loads(pickle.dumps(open)) is open
    assert pickle.loads(pickle.dumps(os.open)) is os.open
    assert os.open in os.supports_dir_fd
    assert open.__name__ == "open"
    assert repr(open) == "<built-in function open>"

    class Opener:
        open = open

    path = folder / "a.txt"
    with Opener().open(path, "w", encoding="utf-8") as file:
        assert type(file) is io.TextIOWrapper
    with pytest.raises(TypeError):
        open()
    with pytest.raises(ValueError, match="mode"):
        open(path, "nonsense")
    with pytest.raises(FileNotFoundError):
        open("")


def test_wrong_arguments_do_not_switch_the_probe_off(observed: Observed, folder: Path) -> None:
    for arguments in ((), (None,), (1.5,), ("a", ["r"]), ("a\0b",), ("a\0b/c", "w"), (b"\xff",)):
        with pytest.raises((TypeError, ValueError, OSError)):
            open(*arguments)
    with pytest.raises(TypeError):
        os.open()
    with pytest.raises(TypeError):
        os.open(folder, "w")

    (folder / "a").touch()

    assert observed.said(folder) == [("write", "a")]


def test_what_a_caller_has_is_not_kept_alive(observed: Observed, folder: Path) -> None:
    class Thing:
        pass

    def work() -> weakref.ref[Thing]:
        thing = Thing()
        with open(folder / "a", "wb"):
            pass
        with pytest.raises(FileNotFoundError):
            open(folder / "none", "rb")
        return weakref.ref(thing)

    gone = work()
    gc.collect()

    assert gone() is None


def test_a_closed_file_is_not_kept_alive(folder: Path) -> None:
    file = open(folder / "a", "wb")
    file.close()
    gone = weakref.ref(file)

    del file

    assert gone() is None


def test_names_that_are_no_text_are_spelt(observed: Observed, folder: Path) -> None:
    with open(os.fsencode(folder) + b"/\xff.bin", "wb"):
        pass

    (write,) = observed.accesses(folder)
    assert write.path == f"{folder}/\\udcff.bin"


def test_after_the_probe_is_gone_everything_is_as_before(observed: Observed, folder: Path) -> None:
    observed.uninstall()

    assert type(open).__name__ == "builtin_function_or_method"
    assert os.open in os.supports_dir_fd
    with open(folder / "a", "wb"):
        pass
    assert observed.said(folder) == []
