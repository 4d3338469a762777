"""What a node's monitor has to send: its ranks' records as they lie on disk, and its own events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from distdiag.any_event import AnyEvent
from distdiag.errors import DamagedFileError
from distdiag.event import Heartbeat, ProbeDisabled, Stacks
from distdiag.event_reader import EventReader
from distdiag.run_dir import RunDir
from distdiag.transports.frames import Batch, to_bytes
from distdiag.wire import MAX_RECORD, encode

BATCH_BYTES: Final = 512 << 10
WINDOW_BYTES: Final = 4 << 20
"""So much may be on its way without an answer; the rest stays on disk until there is room."""
MOST_OWN: Final = 256
"""Own events of one rank that wait; the disk has them, too."""

Record = tuple[int, bytes]


class Outbox:
    """Make batches of what is new, and keep each until it has been acknowledged.

    `put` is called by the monitor, everything else by the thread that sends.
    """

    def __init__(
        self,
        run_dir: RunDir,
        ranks: Iterable[int],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start before the first record of these ranks."""
        self._ranks = {rank: _RankRecords(run_dir, rank, clock) for rank in ranks}
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._number = 0
        self._has_more = True

    def put(self, event: AnyEvent) -> None:
        """Send an event that the monitor itself made, after all that its rank wrote before."""
        self._ranks[event.rank].put(event)

    @property
    def is_full(self) -> bool:
        """Whether so much is on its way that the next batch must wait."""
        return self._num_bytes >= WINDOW_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything was sent and has been acknowledged."""
        has_own = any(records.own or records.beat for records in self._ranks.values())
        return not (self._has_more or self._unacknowledged or has_own)

    def next_batch(self, offset_ns: int, *, even_empty: bool = False) -> bytes | None:
        """Return the next batch as bytes, or None if nothing is new.

        With `even_empty` there is one in any case, which says at least that this node is here.
        """
        records: list[Record] = []
        size = 0
        self._has_more = False
        for rank in tuple(self._ranks):
            if size >= BATCH_BYTES:
                self._has_more = True
                break
            # To the end of the row: with much to send, every rank has its turn.
            source = self._ranks[rank] = self._ranks.pop(rank)
            for payload in source.take(BATCH_BYTES - size):
                records.append((rank, payload))
                size += len(payload)
            self._has_more = self._has_more or not source.is_drained
        if not records and not even_empty:
            return None
        self._number += 1
        frame = to_bytes(Batch(self._number, offset_ns, not self._has_more, tuple(records)))
        self._unacknowledged.append((self._number, frame))
        self._num_bytes += len(frame)
        return frame

    def acknowledge(self, number: int) -> None:
        """Forget the batches up to this number: the reporter has them."""
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._num_bytes -= len(self._unacknowledged.popleft()[1])

    def unacknowledged(self) -> Iterator[bytes]:
        """Yield again what was sent and never acknowledged."""
        yield from [frame for _, frame in self._unacknowledged]


class _RankRecords:
    """The records of one rank and what the monitor has to say of it."""

    def __init__(self, run_dir: RunDir, rank: int, clock: Callable[[], int]) -> None:
        self.own: deque[bytes] = deque(maxlen=MOST_OWN)
        self.beat: bytes | None = None
        self.is_drained = False
        self._rank = rank
        self._clock = clock
        self._reader = EventReader(run_dir.folder, rank)
        self._is_unreadable = False
        self._num_lost = 0

    def put(self, event: AnyEvent) -> None:
        payload = encode(event)
        if isinstance(event, Heartbeat):
            self.beat = payload  # only the newest one matters
            return
        if len(payload) > MAX_RECORD and isinstance(event, Stacks):
            error = f"they take {len(payload)} bytes, too many to send"
            payload = encode(
                Stacks(
                    rank=event.rank,
                    seq=event.seq,
                    time_ns=event.time_ns,
                    source=event.source,
                    error=error,
                )
            )
        self.own.append(payload)

    def take(self, budget: int) -> Iterator[bytes]:
        """Yield about so many bytes of what is new, the rank's own records first."""
        # Counted before the file is read: it then holds all that they come after.
        num_own = len(self.own)
        self.is_drained = False
        for payload in self._all(num_own):
            yield payload
            budget -= len(payload)
            if budget <= 0:
                return
        self.is_drained = True

    def _all(self, num_own: int) -> Iterator[bytes]:
        yield from self._written()
        if (beat := self.beat) is not None:
            self.beat = None
            yield beat
        yield from (self.own.popleft() for _ in range(num_own))

    def _written(self) -> Iterator[bytes]:
        try:
            if not self._is_unreadable:
                yield from self._reader.payloads()
        except DamagedFileError:
            self._is_unreadable = True  # the monitor tells of it, too
        lost = self._reader.num_lost_segments
        if lost > self._num_lost:
            self._num_lost = lost
            yield encode(
                ProbeDisabled(
                    rank=self._rank,
                    seq=-1,
                    time_ns=self._clock(),
                    probe="event-file",
                    reason=f"{lost} segments were dropped before they were sent",
                )
            )
