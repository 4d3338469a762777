"""Stacks that a rank writes itself, where nobody may read them from outside (ptrace is forbidden).

A rank whose background thread runs is asked to, by a file. Once the GIL is held for ever, that
thread gets a signal, in whose handler faulthandler needs no GIL.
"""

import ctypes
import os
import platform
import time
from pathlib import Path
from typing import Final

import msgspec

from distdiag.dumps.base import StackSource
from distdiag.dumps.process.proc import signal_mask
from distdiag.dumps.rank_request import is_answered
from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.record.regular_file import open_regular, read_regular
from distdiag.record.run_dir import RunDir, StackSignal
from distdiag.record.user_code import is_user_file

POLL_S: Final = 0.005
ASK_S: Final = 1.5
"""So long the background thread is given to answer; it looks twice a second."""
MOST_BYTES: Final = 4 << 20

# The number of the system call: C libraries before 2019 have no function for it.
_TGKILL: Final = {"x86_64": 234, "aarch64": 131}


class FaulthandlerSignal(StackSource):
    """Ask a rank for its stacks, or send the signal that its `PostMortem` probe has prepared."""

    name = "faulthandler"

    def __init__(self, run_dir: RunDir, main_script: str | None) -> None:
        """Mark frames of `main_script` as the user's."""
        self._run_dir = run_dir
        self._main_script = main_script

    def dump(self, pid: int, rank: int, timeout_s: float) -> Stacks:
        """Return the stacks of all threads, the main thread first."""
        deadline = time.monotonic() + timeout_s
        try:
            told = self._told(pid, rank)
            path = self._run_dir.stacks(rank)
            begin = path.stat().st_size
            if not is_answered(
                self._run_dir, rank, "stacks", min(deadline, time.monotonic() + ASK_S)
            ):
                _signal(told, path, begin, deadline)
            with open_regular(path) as file:
                file.seek(begin)
                text = file.read(MOST_BYTES).decode("ascii", errors="replace")
        except (OSError, _NoStacksError) as problem:
            return self.stacks(rank, error=str(problem))
        threads = self._parse(text, told.names)
        return self.stacks(rank, threads, error="" if threads else "faulthandler wrote no stack")

    def _told(self, pid: int, rank: int) -> StackSignal:
        try:
            told = msgspec.json.decode(
                read_regular(self._run_dir.stack_signal(rank)), type=StackSignal
            )
        except FileNotFoundError:
            raise _NoStacksError("the rank has prepared no signal for its stacks") from None
        except UNDECODABLE as problem:
            path = self._run_dir.stack_signal(rank)
            raise _NoStacksError(f"{path} is damaged: {problem}") from None
        if told.pid != pid:
            raise _NoStacksError("another process of the rank has prepared the signal")
        return told

    def _parse(self, text: str, names: dict[int, str]) -> tuple[ThreadStack, ...]:
        threads: dict[str, ThreadStack] = {}
        for block in text.split("\n\n"):
            head, *lines = block.strip().splitlines() or [""]
            ident = head.partition("0x")[2].partition(" ")[0]
            if ident:
                name = names.get(int(ident, 16), f"thread 0x{ident}")
                frames = [frame for line in lines if (frame := self._frame(line))]
                threads[ident] = ThreadStack(name=name, frames=tuple(frames))
        return tuple(sorted(threads.values(), key=lambda thread: thread.name != "MainThread"))

    def _frame(self, line: str) -> Frame | None:
        head, _, function = line.rpartition(" in ")
        head, _, number = head.rpartition(", line ")
        file = head.strip().removeprefix('File "').removesuffix('"')
        if not number.isdigit():
            return None
        return Frame(file, int(number), function, is_user_file(file, self._main_script))


class _NoStacksError(Exception):
    """The rank cannot be made to write its stacks, or has not."""


def _signal(told: StackSignal, path: Path, begin: int, deadline: float) -> None:
    """Send the signal and wait until its handler has written everything and has returned."""
    _check(told, path)
    _send(told)
    bit = 1 << (told.signal - 1)
    while time.monotonic() < deadline:
        # In this order: a handler that has begun to write is seen to run until it returns.
        has_begun = path.stat().st_size > begin
        mask = signal_mask(told.pid, "SigPnd", told.thread)
        mask |= signal_mask(told.pid, "SigBlk", told.thread)
        if has_begun and not mask & bit:
            return
        time.sleep(POLL_S)
    raise _NoStacksError("the rank did not write its stacks in time")


def _check(told: StackSignal, path: Path) -> None:
    """Make sure that the signal does nothing but write to the rank's own file.

    Without a handler it would end the process; with the descriptor closed and its number used
    again, the stacks would land in a file or socket of the script.
    """
    bit = 1 << (told.signal - 1)
    if not Path(f"/proc/{told.pid}/task/{told.thread}").exists():
        raise _NoStacksError("the rank's background thread has ended")
    if not signal_mask(told.pid, "SigCgt") & bit:
        raise _NoStacksError(f"the rank no longer handles signal {told.signal}")
    if signal_mask(told.pid, "SigBlk", told.thread) & bit:
        raise _NoStacksError(f"the rank is writing its stacks already, or blocks {told.signal}")
    try:
        is_ours = Path(f"/proc/{told.pid}/fd/{told.descriptor}").samefile(path)
    except OSError:
        is_ours = False
    if not is_ours:
        raise _NoStacksError("the rank's file for stacks is no longer open")


def _send(told: StackSignal) -> None:
    number = _TGKILL.get(platform.machine())
    if number is None:
        raise _NoStacksError(f"signals to single threads are not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, told.pid, told.thread, told.signal) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
