"""A node's end of the connection to the reporter: a thread that sends and never loses its place."""

import hmac
import platform
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, Heartbeat
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import ReporterAddress, RunDir
from distdiag.record.wire import MAX_RECORD, encode
from distdiag.transports.frames import (
    Ack,
    AnyFrame,
    Batch,
    Bye,
    Challenge,
    FrameReader,
    Hello,
    LinkError,
    Orders,
    Ping,
    Pong,
    Welcome,
    to_bytes,
)
from distdiag.transports.handshake import SECRET, Key, nonce

# One connection to the reporter as a node sees it, and the distance of the two clocks.

READ_BYTES: Final = 1 << 16
SILENCE_S: Final = 6.0
"""A connection on which nothing came for so long is given up."""
FIRST_PINGS: Final = 8
NUM_PINGS: Final = 64


class ClockOffset:
    """What is to be added to the clock here to have the clock there, by the quickest of the pings.

    The answer was written at some time between question and arrival; the shorter that is, the less
    it can be wrong.
    """

    def __init__(self) -> None:
        """Know nothing: the clocks are taken for one."""
        self._readings: deque[tuple[int, int]] = deque(maxlen=NUM_PINGS)

    def add(self, pong: Pong, now_ns: int) -> None:
        """Take in the answer to a ping, which arrived now."""
        round_trip_ns = max(0, now_ns - pong.sent_ns)
        middle_ns = pong.sent_ns + round_trip_ns // 2
        self._readings.append((round_trip_ns, pong.here_ns - middle_ns))

    @property
    def offset_ns(self) -> int:
        """The offset in nanoseconds; half of its round trip is the most that it can be off."""
        return min(self._readings)[1] if self._readings else 0

    @property
    def error_ns(self) -> int:
        """The most that the offset can be off, in nanoseconds."""
        return min(self._readings)[0] // 2 if self._readings else 0


class Link:
    """Frames over a connected socket, with a limit to how long the other end may be silent."""

    def __init__(self, connected: socket.socket, clock: Callable[[], int]) -> None:
        """Speak over this socket; `clock` is the monotonic clock of this node."""
        connected.settimeout(SILENCE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._clock = clock
        self._reader = FrameReader()
        self._heard_s = time.monotonic()
        self._arrived: deque[AnyFrame] = deque()

    def send(self, data: AnyFrame | bytes) -> None:
        """Send a frame, or one that has been made into bytes already."""
        self._socket.sendall(data if isinstance(data, bytes) else to_bytes(data))

    def frames(self, timeout_s: float) -> Iterator[AnyFrame]:
        """Yield what has arrived; wait for it if there is nothing, but no longer than this.

        Raises:
            LinkError: the other end has closed the connection, is silent, or sends no frames.

        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not self._arrived and poll.poll(timeout_s * 1000):
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise LinkError("the connection was closed by the other end")
            self._heard_s = time.monotonic()
            self._arrived.extend(self._reader.feed(data))
        if time.monotonic() - self._heard_s > SILENCE_S:
            raise LinkError(f"nothing was heard for {SILENCE_S:.0f} s")
        while self._arrived:
            yield self._arrived.popleft()

    def next_frame(self) -> AnyFrame:
        """Wait for one frame.

        Raises:
            LinkError: the other end has closed the connection, is silent, or sends no frames.

        """
        while True:
            for frame in self.frames(SILENCE_S):
                return frame

    def measure(self, offset: ClockOffset) -> Iterator[AnyFrame]:
        """Compare the clocks by some round trips; yield the other frames that came meanwhile."""
        for _ in range(FIRST_PINGS):
            self.send(Ping(self._clock()))
            while not isinstance(frame := self.next_frame(), Pong):
                yield frame
            offset.add(frame, self._clock())


MOST_NS: Final = 1 << 62
"""No clock shows 146 years; a time of 64 bits and an offset may be too much to be written down."""


def shifted(event: Event, offset_ns: int) -> Event:
    """Return an event with its times as another clock tells them.

    Raises:
        DamagedFileError: no clock shows such times.

    """
    more = {}
    match event:
        case Heartbeat():
            more = {"beat_ns": event.beat_ns + offset_ns}
        case Exited() if event.gone_ns:
            more = {"gone_ns": event.gone_ns + offset_ns}
    times = {"time_ns": event.time_ns + offset_ns, **more}
    if max(map(abs, times.values())) > MOST_NS:
        raise DamagedFileError(f"an event of rank {event.rank} has a time that no clock shows")
    return msgspec.structs.replace(event, **times)


# What a node's monitor has to send: its ranks' records as they lie on disk, and its own events.

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
        self._ranks = {rank: _RankRecords(run_dir, rank, clock) for rank in ranks}
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._number = 0
        self._has_more = True

    def put(self, event: Event) -> None:
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

    def put(self, event: Event) -> None:
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


# The thread that sends.

_REFUSED: Final = f"{SECRET} is not the same here and on the node of rank 0"

LOOK_S: Final = 0.05
"""So often it is looked whether there is something new to send."""
BEAT_S: Final = 0.5
"""A batch goes out at least this often, an empty one if nothing is new."""
PING_S: Final = 1.0
RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 5.0


class Forwarder:
    """Send what is in an `Outbox` to the reporter, over as many connections as it takes."""

    def __init__(
        self,
        outbox: Outbox,
        ranks: RankSet,
        address: Callable[[], ReporterAddress | None],
        *,
        first_words: Callable[[int], Iterable[Event]] = lambda _: (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin to send; `address` is asked until it knows where the reporter listens.

        `first_words` is called once, by the thread that sends, when the two clocks have been
        compared: it gets the most that the offset can be off, in nanoseconds.
        """
        self.orders = Orders()
        self.problem = "where it listens has not become known"
        self.has_connected = False
        self._outbox = outbox
        self._ranks = ranks
        self._address = address
        self._first_words = first_words
        self._clock = clock
        self._session = secrets.token_hex(8)
        self._offset = ClockOffset()
        self._sent_s = self._pinged_s = 0.0
        self._pause_s = RETRY_S
        self._is_closing = threading.Event()
        self._is_cut = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Send an event that the monitor itself made."""
        self._outbox.put(event)

    def finish(self, timeout_s: float) -> bool:
        """Send what is left, within `timeout_s`; return whether all of it was received."""
        self._is_closing.set()
        self._thread.join(timeout_s)
        self._is_cut.set()
        return self._outbox.is_empty

    @property
    def offset_ns(self) -> int:
        """What is to be added to the clock of this node to have that of the reporter."""
        return self._offset.offset_ns

    @property
    def _is_wanted(self) -> bool:
        return not (self._is_cut.is_set() or self.orders.done)

    def _run(self) -> None:
        while self._is_wanted:
            if (address := self._known_address()) is None:
                self._is_cut.wait(RETRY_S)
                continue
            try:
                if self._converse(address):
                    return
            except (OSError, LinkError) as error:
                self.problem = str(error) or type(error).__name__
            self._is_cut.wait(self._pause_s)
            self._pause_s = min(self._pause_s * 1.5, LONGEST_RETRY_S)

    def _known_address(self) -> ReporterAddress | None:
        try:
            return self._address()
        except (OSError, DamagedFileError) as error:
            self.problem = str(error)
            return None

    def _converse(self, address: ReporterAddress) -> bool:
        """Speak with the reporter; return whether everything there will ever be was said."""
        place = (address.host, address.port)
        with socket.create_connection(place, timeout=SILENCE_S) as connected:
            link = Link(connected, self._clock)
            self._introduce(link, Key(address.token))
            for frame in link.measure(self._offset):
                self._take(frame)
            if not self.has_connected:
                for event in self._first_words(self._offset.error_ns):
                    self._outbox.put(event)
            self.has_connected = True
            self._pause_s = RETRY_S
            for batch in self._outbox.unacknowledged():
                link.send(batch)
            return self._send_all(link)

    def _introduce(self, link: Link, key: Key) -> None:
        asked = link.next_frame()
        if not isinstance(asked, Challenge):
            raise LinkError("the other end did not begin as a reporter does")
        hello = Hello(self._session, platform.node(), tuple(self._ranks), nonce())
        link.send(msgspec.structs.replace(hello, proof=hello.prove(key, asked.nonce)))
        try:
            frame = link.next_frame()
        except (OSError, LinkError) as error:
            reason = f"{_REFUSED}, or another node has its ranks"
            raise LinkError(f"the reporter did not accept this node ({error}): {reason}") from None
        if not isinstance(frame, Welcome) or not hmac.compare_digest(
            frame.proof, frame.prove(key, asked.nonce, hello.nonce)
        ):
            raise LinkError(f"who answered is not the reporter, or {_REFUSED}")
        self._outbox.acknowledge(frame.received)

    def _send_all(self, link: Link) -> bool:
        is_last = False
        while self._is_wanted:
            # Looked at first: what the monitor said before it closed is in the batch after that.
            is_closing = self._is_closing.is_set()
            has_sent = self._send_next(link, is_forced=is_closing and not is_last)
            is_last = is_last or (has_sent and is_closing)
            if is_last and self._outbox.is_empty:
                link.send(Bye())
                return True
            for frame in link.frames(0.0 if has_sent else LOOK_S):
                self._take(frame)
        return False

    def _send_next(self, link: Link, *, is_forced: bool) -> bool:
        """Send a batch if there is something to be sent, or nothing was for some time."""
        now_s = time.monotonic()
        if now_s - self._pinged_s > PING_S:
            self._pinged_s = now_s
            link.send(Ping(self._clock()))
        if self._outbox.is_full:
            return False
        is_due = is_forced or now_s - self._sent_s > BEAT_S
        batch = self._outbox.next_batch(self._offset.offset_ns, even_empty=is_due)
        if batch is not None:
            self._sent_s = now_s
            link.send(batch)
        return batch is not None

    def _take(self, frame: AnyFrame) -> None:
        match frame:
            case Ack():
                self._outbox.acknowledge(frame.number)
            case Pong():
                self._offset.add(frame, self._clock())
            case Orders():
                self.orders = frame
            case _:
                raise LinkError(f"{type(frame).__name__} was not expected")
