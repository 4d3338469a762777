"""What a probe calls to write down what it sees, cheap enough for the training thread.

Nothing here waits: no lock, no system call, no store. Values that repeat are written once and
then named by numbers; `tables` says which numbers are known at the moment.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Final

from distdiag.events.base import CallSite, Event, Frame, Phase
from distdiag.events.collectives import GroupCreated, ProcessGroup, Signature
from distdiag.events.files import FileAction, HostSynced, StoreCall
from distdiag.events.lifecycle import Finished
from distdiag.record.event_file import KEPT_SEGMENTS, NO_PLACE, EventWriter
from distdiag.record.signals import Signal
from distdiag.record.status_page import EVENTS_STOPPED, StatusPage
from distdiag.record.thread_context import Here
from distdiag.record.wire import (
    STATES,
    DefineFrame,
    DefineGroup,
    DefineSignature,
    DefineSite,
    encode,
)

_SYNCS: Final = frozenset({GroupCreated, StoreCall, HostSynced, Finished})

_STATE_NUMBERS: Final = {name: number for number, name in enumerate(STATES)}


class Site:
    """A call site under its number, with what was learnt when it was first seen.

    `api` is the public torch function that was called there. `is_own_call` tells that the user's
    code called it, not torch itself or a framework.
    """

    __slots__ = ("api", "frames", "is_own_call", "kept_alive", "number")

    def __init__(
        self,
        number: int,
        frames: tuple[Frame, ...],
        *,
        api: str | None,
        is_own_call: bool,
        kept_alive: object,
    ) -> None:
        self.number = number
        self.frames = frames
        self.api = api
        self.is_own_call = is_own_call
        self.kept_alive = kept_alive


class Tables:
    """The numbers of what is defined in the event file, by keys that are cheap to make."""

    __slots__ = ("frames", "groups", "signatures", "sites")

    def __init__(self) -> None:
        self.groups: dict[Hashable, int] = {}
        self.signatures: dict[Hashable, int] = {}
        self.frames: dict[Frame, int] = {}
        self.sites: dict[Hashable, Site] = {}


class Recorder:
    """Appends the events of one rank to its event file and keeps its status page."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        page: StatusPage,
        *,
        main_script: str | None = None,
        before_sync: Signal[[bool]] | None = None,
        kept_segments: int = KEPT_SEGMENTS,
    ) -> None:
        """Create the event file; `before_sync` gets events that order what ranks do.

        Raises:
            OSError: there is no room for it.

        """
        self.rank = rank
        self.folder = folder
        self.step = 0
        self.num_batches = 0
        self.num_backwards = 0
        self.num_events = 0
        self.generation = 0
        self.num_verified: Counter[str] = Counter()
        self.main_script = main_script
        self.closed = False
        self.here = Here()
        self.tables = Tables()
        self.phase = Phase.STARTING
        self.backward: tuple[Hashable, tuple[Frame, ...]] | None = None
        """From where the backward pass that runs was called, as a key and as frames."""
        self._page = page
        self._before_sync = before_sync or Signal()
        self._seqs = count()
        self._numbers = count()
        # The number of the last call and the place of its mark, as one value for all threads.
        self._last_call = (-1, NO_PLACE)
        self._writer = EventWriter(
            folder, rank, on_forget=self._forget, kept_segments=kept_segments
        )

    def _forget(self) -> None:
        # Replaced, not cleared: another thread may be in the middle of using the old ones.
        self.tables = Tables()

    def define_group(self, key: Hashable, group: ProcessGroup) -> int:
        """Write a process group down under a new number, to be found by this key."""
        tables, number = self.tables, next(self._numbers)
        self._writer.define(encode(DefineGroup(number, group)))
        tables.groups[key] = number
        return number

    def define_signature(self, key: Hashable, signature: Signature) -> int:
        """Write a signature down under a new number, to be found by this key."""
        tables, number = self.tables, next(self._numbers)
        self._writer.define(encode(DefineSignature(number, signature)))
        tables.signatures[key] = number
        return number

    def define_site(
        self,
        key: Hashable,
        site: CallSite,
        *,
        api: str | None,
        is_own_call: bool,
        kept_alive: object,
    ) -> Site:
        """Write a call site down under a new number, to be found by this key."""
        tables, number = self.tables, next(self._numbers)
        frames = tuple(self._frame_number(tables, frame) for frame in site.frames)
        self._writer.define(encode(DefineSite(number, frames, site.module)))
        known = Site(number, site.frames, api=api, is_own_call=is_own_call, kept_alive=kept_alive)
        tables.sites[key] = known
        return known

    def _frame_number(self, tables: Tables, frame: Frame) -> int:
        number = tables.frames.get(frame)
        if number is None:
            number = next(self._numbers)
            self._writer.define(encode(DefineFrame(number, frame)))
            tables.frames[frame] = number
        return number

    def call(  # noqa: PLR0913 (a struct for seven values would cost more than the rest)
        self,
        group: int,
        collective_seq_id: int,
        signature: int,
        site: int,
        is_async: bool,
        thread: str | None,
        api: str | None,
        by_host: bool = True,
    ) -> int:
        """Write down a collective that is about to be issued; return its event number.

        `group`, `signature` and `site` are numbers of definitions; `thread` is None in the main
        thread. `by_host` says that the host waits for it, not a stream of the device.
        """
        for tell in self._before_sync.subscribers:
            tell(by_host)
        seq = next(self._seqs)
        self.num_events = seq + 1
        now_ns, step = monotonic_ns(), self.step
        # A tuple is encoded as the `CallRecord` would be, in half the time.
        record = encode(
            (
                "C",
                seq,
                now_ns,
                step,
                group,
                collective_seq_id,
                signature,
                site,
                is_async,
                thread,
                api,
            )
        )
        self._last_call = (seq, self._writer.append_call(record))
        return seq

    def mark(self, call: int, mark: int) -> None:
        """Say that a call went on (`ISSUED`, `WAITED`) before its thread did anything else."""
        last, place = self._last_call
        if last != call or not self._writer.mark(place, mark):
            self.state(call, STATES[mark - 1])

    def state(self, call: int, name: str) -> None:
        """Write down that the call with this event number went on."""
        for tell in self._before_sync.subscribers:
            tell(True)
        seq = next(self._seqs)
        self.num_events = seq + 1
        state = _STATE_NUMBERS[name]
        self._writer.append(encode(("T", seq, monotonic_ns(), self.step, call, state)))

    def access(self, action: FileAction, path: str, written: str, site: int, *more: object) -> int:
        """Write down an access to a file; return its event number.

        `site` is the number of a definition; `more` are the further fields of an `AccessRecord`,
        in their order.
        """
        seq = next(self._seqs)
        self.num_events = seq + 1
        self._writer.append(
            encode(("A", seq, monotonic_ns(), self.step, action, path, written, site, *more))
        )
        return seq

    def event(self, kind: type[Event], **fields: object) -> int:
        """Write down one of the rarer events; return its event number."""
        if self._before_sync.subscribers and kind in _SYNCS:
            self._before_sync.emit(True)
        seq = next(self._seqs)
        self.num_events = seq + 1
        fields.setdefault("step", self.step)
        make: Callable[..., Event] = kind
        event = make(rank=self.rank, seq=seq, time_ns=monotonic_ns(), **fields)
        self._writer.append(encode(event))
        return seq

    def set_phase(self, phase: Phase) -> Phase:
        """Say what the rank begins to do; return what it did before."""
        before, self.phase = self.phase, phase
        if phase is not before and not self.closed:
            self._page.set_phase(phase)
        return before

    def push_progress(self) -> None:
        """Show the counters on the status page."""
        if not self.closed:
            self._page.set_progress(
                step=self.step, num_batches=self.num_batches, num_backwards=self.num_backwards
            )

    def beat(self) -> None:
        """Say that the background thread runs."""
        if self.closed:
            return
        self._page.beat(monotonic_ns(), self.num_events)
        if self._writer.stopped is not None:
            self._page.raise_flag(EVENTS_STOPPED)

    def raise_flag(self, flag: int) -> None:
        """Set a flag of the status page for good."""
        if not self.closed:
            self._page.raise_flag(flag)

    def close(self) -> None:
        """Write nothing from now on: the rank has finished, or this is a forked child."""
        self.closed = True

    def abandon(self) -> None:
        """Let go of files that belong to the parent process."""
        self.closed = True
        self._writer.abandon()
        self._page.abandon()
