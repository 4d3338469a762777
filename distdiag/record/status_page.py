"""What a rank is doing now: one small mapped file for each rank, written in place.

The event file is the history, the status page the present. Writing costs a store into memory, and
what was written is readable after SIGKILL and while the GIL is held for ever.
"""

import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.base import Phase
from distdiag.events.errors import DamagedFileError
from distdiag.record.private_file import Mapping, create_private
from distdiag.record.regular_file import read_head

_MAGIC: Final = b"ddstat01"
_LAYOUT: Final = struct.Struct("<8sqqqqqqqqq")
_PHASES: Final = tuple(Phase)
_SIZE: Final = 4096
_OFFSET: Final = {
    name: 8 + 8 * index
    for index, name in enumerate(
        (
            "pid",
            "beat_ns",
            "phase",
            "step",
            "num_batches",
            "num_backwards",
            "flags",
            "num_events",
            "start_ticks",
        )
    )
}
_INT: Final = struct.Struct("<q")
_PHASE_NUMBERS: Final = {phase: number for number, phase in enumerate(_PHASES)}
_PHASE_AT: Final = _OFFSET["phase"]
_PROGRESS: Final = struct.Struct("<qqq")
_PROGRESS_AT: Final = _OFFSET["step"]
"""The step, and after it the batches and the backward passes: written at once."""
_HIGHEST_PID: Final = 1 << 22
"""Linux gives no higher number to a process (PID_MAX_LIMIT)."""

FINISHED: Final = 1
RAISED: Final = 2
EVENTS_STOPPED: Final = 4
DETACHED: Final = 8


def start_ticks(pid: int) -> int:
    """Return when a process began, in the kernel's ticks since the boot; 0 if it is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The name in parentheses may hold anything, parentheses included.
    return int(text.rpartition(")")[2].split()[19])


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of a status page. Times are nanoseconds of the rank's monotonic clock.

    `start_ticks` is when the process began, as the kernel counts it: pids are used again.
    """

    pid: int
    start_ticks: int
    beat_ns: int
    phase: Phase
    step: int
    num_batches: int
    num_backwards: int
    finished: bool
    raised: bool
    events_stopped: bool
    detached: bool
    num_events: int


class StatusPage:
    """The writing side, held by the rank."""

    def __init__(self, path: Path) -> None:
        descriptor = create_private(path)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._mapping = Mapping(descriptor, _SIZE)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._memory = self._mapping.memory
        self._flags = 0
        self._store("pid", os.getpid())
        self._store("start_ticks", start_ticks(os.getpid()))
        self._memory[0:8] = _MAGIC

    def _store(self, name: str, value: int) -> None:
        _INT.pack_into(self._memory, _OFFSET[name], value)

    def beat(self, time_ns: int, num_events: int) -> None:
        """Say that the background thread ran at this time."""
        self._store("beat_ns", time_ns)
        self._store("num_events", num_events)

    def set_phase(self, phase: Phase) -> None:
        """Say what the rank begins to do."""
        _INT.pack_into(self._memory, _PHASE_AT, _PHASE_NUMBERS[phase])

    def set_progress(self, *, step: int, num_batches: int, num_backwards: int) -> None:
        """Say how far the rank is."""
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, step, num_batches, num_backwards)

    def raise_flag(self, flag: int) -> None:
        """Set one of the flags of this module for good."""
        self._flags |= flag
        self._store("flags", self._flags)

    def abandon(self) -> None:
        """Let go of the page: it belongs to the parent process."""
        self._memory = memoryview(bytearray(_SIZE))


def read_status(path: Path) -> Status:
    """Read a status page.

    Raises:
        DamagedFileError: the file is not a status page, or cannot be read.
        FileNotFoundError: there is none yet, or it is just being made.

    """
    try:
        data = read_head(path, _LAYOUT.size)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from None
    if not any(data[:8]):
        raise FileNotFoundError(f"{path} was created a moment ago")
    if len(data) < _LAYOUT.size or data[:8] != _MAGIC:
        raise DamagedFileError(f"{path} is not a status page")
    _, pid, beat_ns, phase, step, num_batches, num_backwards, flags, num_events, ticks = (
        _LAYOUT.unpack(data)
    )
    if not 0 <= pid <= _HIGHEST_PID:
        raise DamagedFileError(f"{path} names process {pid}, which cannot be")
    return Status(
        pid=pid,
        start_ticks=ticks,
        beat_ns=beat_ns,
        phase=_PHASES[phase] if 0 <= phase < len(_PHASES) else Phase.SCRIPT,
        step=step,
        num_batches=num_batches,
        num_backwards=num_backwards,
        finished=bool(flags & FINISHED),
        raised=bool(flags & RAISED),
        events_stopped=bool(flags & EVENTS_STOPPED),
        detached=bool(flags & DETACHED),
        num_events=num_events,
    )
