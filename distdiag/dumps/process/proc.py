"""Whether a process still lives and what it has used, from the kernel's own records."""

import fcntl
import os
import select
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from distdiag.record.redaction import redacted

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_DEAD: Final = frozenset("ZX")
LONGEST_COMMAND: Final = 200
"""Characters of a command line that are shown: more than a line of a terminal, and not a page."""
# struct pidfd_info of <linux/pidfd.h> in its first size, and what asks for it.
_PIDFD_INFO: Final = struct.Struct("=Q 52x i")
_PIDFD_INFO_EXIT: Final = 1 << 3
_PIDFD_GET_INFO: Final = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11


class ProcessState(NamedTuple):
    """One reading. `state` is the kernel's letter (R, S, D, T, Z).

    `wait_status` is what the parent of a process that has ended will be told; it is None while the
    process lives, and where we may not know it.
    `reaped_cpu_s` is the processor time of those descendants that have ended and were waited for.
    """

    state: str
    cpu_s: float
    start_ticks: int
    wait_status: int | None = None
    parent_pid: int = 0
    reaped_cpu_s: float = 0.0


def read_process(pid: int) -> ProcessState | None:
    """Read the state of a process, or return None when there is none of this number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, parentheses included.
    fields = text.rpartition(")")[2].split()
    return ProcessState(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        start_ticks=int(fields[19]),
        wait_status=_wait_status_in(fields, pid),
        parent_pid=int(fields[1]),
        reaped_cpu_s=(int(fields[13]) + int(fields[14])) / _TICKS_PER_S,
    )


def _wait_status_in(fields: list[str], pid: int) -> int | None:
    """Return the status of a process that has ended: the kernel shows others 0 instead."""
    if fields[0] not in _DEAD or len(fields) <= 49:
        return None
    if status := int(fields[49]):
        return status
    try:
        is_ours = os.geteuid() in (0, Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return None
    return 0 if is_ours else None


def proc_text(pid: int, name: str) -> str:
    """Read one of the kernel's small files on a process, such as ``status`` or ``task/7/stat``.

    It is empty where there is no such process, or where the kernel does not let us read it.
    """
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """Return the command line of a process, shortened and without secrets; else its name."""
    words = proc_text(pid, "cmdline").split("\0")
    text = " ".join(" ".join(redacted(words)).split()) or proc_text(pid, "comm")
    return text if len(text) <= LONGEST_COMMAND else text[: LONGEST_COMMAND - 1] + "…"


def status_fields(text: str) -> dict[str, str]:
    """Take the kernel's ``status`` of a process or thread apart: ``VmRSS: 12 kB`` and the like."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def signal_mask(pid: int, name: str, thread: int | None = None) -> int:
    """Read a set of signals of a process or of one of its threads: bit n - 1 stands for signal n.

    `name` is the kernel's: SigCgt (caught), SigBlk (blocked), SigPnd (waiting for the thread). It
    is 0 where there is no such process or thread.
    """
    text = proc_text(pid, "status" if thread is None else f"task/{thread}/status")
    return int(status_fields(text).get(name, "0"), 16)


class Process:
    """A process that is followed until it is gone, even if its number is used again."""

    def __init__(self, pid: int, start_ticks: int = 0, *, held: int = -1) -> None:
        """Follow the process that has this number and began then (0: that has it now).

        `held` is a descriptor of it that was opened while it lived.
        """
        self.pid = pid
        self._wait_status: int | None = None
        self._descriptor = held if held >= 0 else _open_pidfd(pid)
        reading = read_process(pid)
        self._start_ticks = start_ticks or (reading.start_ticks if reading else 0)
        if held < 0 and self.is_gone:
            self.close()  # it may be that of another process by now

    def read(self) -> ProcessState | None:
        """Read the state, or return None when the process is gone (or has ended as a zombie)."""
        reading = read_process(self.pid)
        if reading is None or reading.start_ticks != self._start_ticks:
            return None
        if reading.state in _DEAD:
            if reading.wait_status is not None:
                self._wait_status = reading.wait_status
            return None
        return reading

    @property
    def exit_status(self) -> int | None:
        """How the process ended: its status, or minus the number of a signal; None if unknown.

        It is known if somebody looked before the parent did, and from Linux 6.15 on after that too.
        """
        wait_status = self._wait_status
        if wait_status is None:
            wait_status = _wait_status_of(self._descriptor)
        return None if wait_status is None else os.waitstatus_to_exitcode(wait_status)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.read() is None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends, or -1."""
        return self._descriptor

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def wait_for_end(processes: Iterable[Process], timeout_s: float) -> None:
    """Wait until one of the processes ends, but no longer than `timeout_s`."""
    poll = select.poll()
    for process in processes:
        if process.fileno() >= 0:
            poll.register(process.fileno(), select.POLLIN)
    poll.poll(timeout_s * 1000)


def wait_for_pid_file(path: Path, timeout_s: float) -> None:
    """Wait until the process that a file names has ended, but no longer than `timeout_s`."""
    with suppress(OSError, ValueError):
        process = Process(int(path.read_text(encoding="ascii")))
        if not process.is_gone:
            wait_for_end([process], timeout_s)


def kill_families(pids: Iterable[int]) -> None:
    """Kill processes and their descendants, except for this process and its own."""
    me = psutil.Process()
    spared = {me.pid, *(child.pid for child in me.children(recursive=True))}
    victims: list[psutil.Process] = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            # The family first: a killed parent's children are nobody's any more.
            victims += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for victim in victims:
        if victim.pid not in spared:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                victim.kill()


def _wait_status_of(descriptor: int) -> int | None:
    """Ask the kernel how a process ended whose parent knows it already."""
    answer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
    except (OSError, ValueError):  # an older kernel, or no descriptor
        return None
    known, wait_status = _PIDFD_INFO.unpack(answer)
    return int(wait_status) if known & _PIDFD_INFO_EXIT else None


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone, or a kernel without pidfds: the loop notices one poll later
        return -1


def all_pids() -> Iterator[int]:
    """Yield the processes that there are; none where ``/proc`` cannot be read."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    yield from (int(name) for name in names if name.isdigit())
