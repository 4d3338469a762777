"""The events of the ranks of this node, from the files that they leave in the run directory."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Final, Protocol

from distdiag.events.base import Event, Phase
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, Finished, Heartbeat, ProbeDisabled, Raised
from distdiag.record.event_reader import EventReader
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import Status, read_status
from distdiag.record.wire import EventDecoder, Interner
from distdiag.transports.base import EventSource

BATCH: Final = 5000
"""So many records of one rank are read before the next rank has its turn."""
BEAT_EVERY_NS: Final = 500_000_000
STILL_NS: Final = 500_000_000
"""A rank of which nothing was heard for so long stands still: its family is looked at."""


class ProcessReading(Protocol):
    """What this module must know of a living process."""

    @property
    def cpu_s(self) -> float:
        """The processor time that it has used, in seconds."""


class WatchedProcess(Protocol):
    """A process that is followed until it is gone."""

    def read(self) -> ProcessReading | None:
        """Return None when the process is gone."""

    @property
    def exit_status(self) -> int | None:
        """How it ended: its status, or minus the number of a signal; None if unknown."""


class FamilyReading(Protocol):
    """What this module must know of the descendants of a process, and of what it transfers."""

    @property
    def children_cpu_s(self) -> float:
        """The processor time that the descendants have used, in seconds."""

    @property
    def num_children(self) -> int:
        """How many of them live."""

    @property
    def io_bytes(self) -> int:
        """What the process has read and written."""


Watch = Callable[[int, int], WatchedProcess]
"""Begin to follow the process of a pid that began at these ticks."""
Family = Callable[[int], FamilyReading]
"""Look at the descendants of a pid."""


class LocalFiles(EventSource):
    """Follow the event files, status pages and processes of some ranks of this node.

    Besides what the ranks wrote it yields `Heartbeat`, `Exited` (after all that the rank wrote) and
    `ProbeDisabled` where something cannot be read.
    """

    def __init__(
        self,
        run_dir: RunDir,
        ranks: Iterable[int],
        watch: Watch,
        interner: Interner,
        *,
        family: Family | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Follow these ranks; `watch` is asked to follow the process of each.

        `interner` is shared with the other sources of the same engine. `family` is asked about the
        descendants of ranks that stand still.
        """
        self._clock = clock
        self._ranks = {
            rank: _RankFiles(run_dir, rank, interner, watch, family, clock) for rank in ranks
        }

    @property
    def pids(self) -> Mapping[int, int]:
        """The pids of the ranks that have begun, by rank, whether they still live or not."""
        return {rank: files.pid for rank, files in self._ranks.items() if files.pid is not None}

    def poll(self) -> Iterator[Event]:
        """Yield what is new, rank by rank."""
        for files in self._ranks.values():
            yield from files.poll(self._clock())

    def close(self) -> None:
        """Nothing is held open but mappings, which end with their readers."""
        self._ranks.clear()


class _RankFiles:
    """The files and the process of one rank."""

    def __init__(
        self,
        run_dir: RunDir,
        rank: int,
        interner: Interner,
        watch: Watch,
        family: Family | None,
        clock: Callable[[], int],
    ) -> None:
        self.pid: int | None = None
        self._rank = rank
        self._path = run_dir.status(rank)
        self._note = run_dir.unobserved(rank)
        self._watch = watch
        self._family = family
        self._clock = clock
        self._reader = EventReader(run_dir.folder, rank)
        self._decoder = EventDecoder(rank, interner)
        self._process: WatchedProcess | None = None
        self._said: set[str] = set()
        self._unreadable = False
        self._alive_ns = 0
        self._was_seen_alive = False
        self._beat_ns = 0
        self._beat_key: tuple[object, ...] = ()
        self._moved_ns = 0
        self._gone = False

    def poll(self, now_ns: int) -> Iterator[Event]:
        if self._gone or (self._process is None and (yield from self._unobserved(now_ns))):
            return
        # The process is looked at first: what it wrote before it ended is then all there.
        yield from self._find_process(now_ns)
        reading = self._process.read() if self._process else None
        if reading is not None:
            self._alive_ns, self._was_seen_alive = now_ns, True
        is_drained = yield from self._events(now_ns)
        status = self._status()
        if status is None or (status is _LOST and (yield from self._unobserved(now_ns))):
            return
        yield from self._events_of_flags(status, now_ns, is_drained=is_drained)
        if reading is not None:
            yield from self._heartbeat(status, reading, now_ns)
        elif is_drained:
            yield from self._exited(status, now_ns)

    def _unobserved(self, now_ns: int) -> Generator[Event, None, bool]:
        """Say why nothing is to be expected of the rank, if its agent could not start."""
        try:
            reason = read_regular(self._note).decode(errors="replace")
        except OSError:
            return False
        self.pid, self._gone = None, True
        yield from self._disabled("agent", reason, now_ns)
        return True

    def _find_process(self, now_ns: int) -> Iterator[Event]:
        if self._process is not None:
            return
        try:
            status = read_status(self._path)
        except FileNotFoundError:
            return
        except DamagedFileError as error:
            yield from self._disabled("status-page", str(error), now_ns)
            return
        self.pid = status.pid
        self._process = self._watch(status.pid, status.start_ticks)
        self._alive_ns = status.beat_ns

    def _status(self) -> Status | None:
        if self._process is None:
            return None
        try:
            return read_status(self._path)
        except (DamagedFileError, FileNotFoundError):  # removed or overwritten during the run
            return _LOST

    def _events(self, now_ns: int) -> Generator[Event, None, bool]:
        """Yield the events that were written; return whether there are no more for now."""
        num_read = 0
        try:
            for payload in () if self._unreadable else self._reader.payloads(BATCH):
                num_read += 1
                yield from self._decoded(payload, now_ns)
        except DamagedFileError as error:
            self._unreadable = True  # where the next record begins is not known any more
            yield from self._disabled("event-file", str(error), now_ns)
        return num_read < BATCH

    def _decoded(self, payload: bytes, now_ns: int) -> Iterator[Event]:
        try:
            event = self._decoder.decode(payload)
        except DamagedFileError as error:
            yield from self._disabled("event-file", str(error), now_ns)
            return
        if event is None:
            return
        if event.rank != self._rank:
            reason = f"it holds an event of rank {event.rank}"
            yield from self._disabled("event-file", reason, now_ns)
            return
        if isinstance(event, Finished | Raised):
            self._said.add(type(event).__name__)
        if event.seq >= 0:
            self._alive_ns = max(self._alive_ns, event.time_ns)
            self._moved_ns = now_ns
        yield event

    def _disabled(self, probe: str, reason: str, now_ns: int) -> Iterator[Event]:
        """Tell once for each probe that it does not tell everything."""
        if probe not in self._said:
            self._said.add(probe)
            yield ProbeDisabled(rank=self._rank, seq=-1, time_ns=now_ns, probe=probe, reason=reason)

    def _events_of_flags(self, status: Status, now_ns: int, *, is_drained: bool) -> Iterator[Event]:
        """Yield what only the status page could still say, such as on a full disk."""
        if status.detached:
            yield from self._disabled("agent", "it was detached, or could not start", now_ns)
        if status.events_stopped:
            is_there = self._path.parent.is_dir()
            why = "the disk or a quota is full" if is_there else "the run directory was removed"
            reason = f"it could not be written any more: {why}"
            yield from self._disabled("event-file", reason, now_ns)
        if not is_drained or not (status.events_stopped or self._unreadable):
            return
        if status.raised and "Raised" not in self._said:
            self._said.add("Raised")
            yield Raised(
                rank=self._rank,
                seq=-1,
                time_ns=self._alive_ns,
                step=status.step,
                type="an exception",
                message="its record could not be written",
                frames=(),
                traceback="",
            )
        elif status.finished and "Finished" not in self._said:
            yield self._finished(status)

    def _finished(self, status: Status) -> Finished:
        self._said.add("Finished")
        return Finished(
            rank=self._rank, seq=-1, time_ns=self._alive_ns, step=status.step, exit_status=0
        )

    def _heartbeat(self, status: Status, reading: ProcessReading, now_ns: int) -> Iterator[Event]:
        key = (status.phase, status.step, status.num_batches, status.num_backwards)
        if key == self._beat_key and now_ns - self._beat_ns < BEAT_EVERY_NS:
            return
        if key != self._beat_key:
            self._moved_ns = now_ns
        self._beat_key, self._beat_ns = key, now_ns
        is_still = now_ns - self._moved_ns >= STILL_NS
        family = self._family(status.pid) if self._family and is_still else None
        yield Heartbeat(
            rank=self._rank,
            seq=-1,
            time_ns=now_ns,
            step=status.step,
            phase=status.phase,
            beat_ns=status.beat_ns,
            num_batches=status.num_batches,
            num_backwards=status.num_backwards,
            cpu_s=reading.cpu_s,
            children_cpu_s=family.children_cpu_s if family else None,
            num_children=family.num_children if family else 0,
            io_bytes=family.io_bytes if family else 0,
        )

    def _exited(self, status: Status, now_ns: int) -> Iterator[Event]:
        self._gone = True
        how = self._process.exit_status if self._process is not None else None
        if (status.detached or how == 0) and not {"Finished", "Raised"} & self._said:
            # It was not observed any more, or ran another program (exec) and that ended well:
            # nothing says that it ended badly.
            yield self._finished(status)
        # It ended some time after it was last seen alive: that is before what its end caused. Of a
        # process that had ended before anybody looked, others may have caused the end meanwhile,
        # which only its status tells.
        is_dated = self._was_seen_alive or how is not None
        alive_ns = max(self._alive_ns, status.beat_ns) if is_dated else now_ns
        yield Exited(
            rank=self._rank,
            seq=-1,
            time_ns=min(alive_ns, now_ns),
            step=status.step,
            reason="the process is gone",
            status=how,
            gone_ns=self._clock(),  # it wrote until after `now_ns`, perhaps
        )


_LOST: Final = Status(
    pid=0,
    start_ticks=0,
    beat_ns=0,
    phase=Phase.SCRIPT,
    step=0,
    num_batches=0,
    num_backwards=0,
    finished=False,
    raised=False,
    events_stopped=True,
    detached=False,
    num_events=0,
)
"""What stands for a status page that was there and is not any more."""
