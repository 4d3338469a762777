"""Stacks of a running process, read from outside by py-spy, without the GIL.

The Python stacks come first: they take milliseconds and do not stop the process. The native frames
between them are a second pass, which py-spy can only make while the process stands still.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from distdiag.dumps.base import StackSource
from distdiag.dumps.process.proc import read_process, signal_mask
from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.record.user_code import is_user_file

MOST_BYTES: Final = 32 << 20
MOST_THREADS: Final = 512
MOST_FRAMES: Final = 300
LONGEST_NAME: Final = 300
"""Names of C++ functions hold their arguments, templates spelt out, and may fill a page."""
TRIES: Final = 3
"""The process is not stopped while it is read, so a reading may be torn and is taken again."""

_MAIN: Final = "MainThread"
_FORBIDDEN: Final = ("permission denied", "operation not permitted", "eperm", "os error 13")
_GONE: Final = ("no such process", "check that the process is running", "os error 3)")


class _SpyFrame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int = 0
    module: str | None = None


class _SpyThread(msgspec.Struct, frozen=True):
    frames: tuple[_SpyFrame, ...]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


_decode: Final = msgspec.json.Decoder(tuple[_SpyThread, ...]).decode


class PySpy(StackSource):
    """Run ``py-spy dump`` and read its JSON."""

    name = "py-spy"
    mode: ClassVar[tuple[str, ...]] = ("--nonblocking",)
    tries: ClassVar[int] = TRIES

    def __init__(self, main_script: str | None, *, program: str | None = None) -> None:
        """Mark frames of `main_script` as the user's; `program` is found if it is not given."""
        self._main_script = main_script
        self._program = program or _find_program()

    def dump(self, pid: int, rank: int, timeout_s: float) -> Stacks:
        """Return the stacks of all threads, the main thread first."""
        deadline = time.monotonic() + timeout_s
        error = "py-spy is not installed"
        for _ in range(self.tries if self._program else 0):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return self.stacks(rank, self._read(pid, left))
            except subprocess.TimeoutExpired:
                error = f"py-spy gave no answer within {timeout_s:.3g} s"
                break
            except (OSError, _SpyError, *UNDECODABLE) as problem:
                error = str(problem)
                if isinstance(problem, _LastingError):
                    break
        return self.stacks(rank, error=error)

    def _read(self, pid: int, timeout_s: float) -> tuple[ThreadStack, ...]:
        assert self._program is not None
        done = subprocess.run(
            [self._program, "dump", "--json", *self.mode, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "RUST_BACKTRACE": "0"},
            check=False,
        )
        if done.returncode != 0:
            raise _explained(done.stderr.decode(errors="replace"), done.returncode)
        if len(done.stdout) > MOST_BYTES:
            raise _LastingError(f"py-spy wrote {len(done.stdout)} bytes")
        threads = [self._thread(thread) for thread in _decode(done.stdout)[:MOST_THREADS]]
        if not threads:
            raise _SpyError("py-spy saw no thread")
        return tuple(sorted(threads, key=lambda thread: thread.name != _MAIN))

    def _thread(self, thread: _SpyThread) -> ThreadStack:
        return ThreadStack(
            name=thread.thread_name or f"thread {thread.os_thread_id or '?'}",
            frames=tuple(self._frame(frame) for frame in thread.frames[:MOST_FRAMES]),
            holds_gil=thread.owns_gil,
            active=thread.active,
        )

    def _frame(self, frame: _SpyFrame) -> Frame:
        if frame.module is not None:  # native: the library, or the source file where it is known
            return Frame(frame.filename, frame.line, frame.name[:LONGEST_NAME], user=False)
        user = is_user_file(frame.filename, self._main_script)
        # Newer Pythons give the qualified name; the ranks record, as tracebacks do, the last part.
        return Frame(frame.filename, frame.line, frame.name.rpartition(".")[2], user)


class PySpyNative(PySpy):
    """Run ``py-spy dump --native``: the frames of C and C++ too, the Python frames among them.

    The process stands still meanwhile: for a fraction of a second, or for tens of seconds while the
    symbols of large libraries are loaded. So this is for processes that hang anyway, after the
    Python stacks are safe.
    """

    name = "py-spy-native"
    is_native = True
    mode = ("--native",)
    tries = 1

    def dump(self, pid: int, rank: int, timeout_s: float) -> Stacks:
        """Return the stacks of all threads, the main thread first."""
        before = read_process(pid)
        stacks = super().dump(pid, rank, timeout_s)
        if stacks.error and before is not None and before.state not in "Tt":
            _let_run(pid)
        return stacks


def _let_run(pid: int) -> None:
    """Undo a stop that a killed py-spy may have left pending; a running process notices nothing."""
    if not signal_mask(pid, "SigCgt") & (1 << (signal.SIGCONT - 1)):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


class _SpyError(Exception):
    """py-spy could not read the process; another try may succeed."""


class _LastingError(_SpyError):
    """py-spy could not read the process, and will not."""


def _explained(stderr: str, status: int) -> _SpyError:
    said = stderr.casefold()
    if any(sign in said for sign in _FORBIDDEN):
        return _LastingError(
            "ptrace is forbidden: py-spy needs root, CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE) "
            "or kernel.yama.ptrace_scope=0"
        )
    if any(sign in said for sign in _GONE):
        return _LastingError("the process is gone")
    first = next((line.strip() for line in stderr.splitlines() if line.strip()), "no message")
    return _SpyError(f"py-spy ended with status {status}: {first}")


def _find_program() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
