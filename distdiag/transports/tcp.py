"""The events of the ranks of other nodes, as their monitors send them over TCP."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, NodeLost, ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.record.run_dir import ReporterAddress
from distdiag.record.wire import EventDecoder, Interner
from distdiag.transports.base import EventSource
from distdiag.transports.forwarder import shifted
from distdiag.transports.frames import (
    MAX_FRAME,
    MAX_HELLO,
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
from distdiag.transports.handshake import NONCE_BYTES, Key, nonce

# The reporter's end of the connections: a thread that speaks the frames with every node.
#
# It answers pings at once, whatever the monitor is busy with, because clocks are compared by them.

READ_BYTES: Final = 1 << 18
HANDSHAKE_S: Final = 5.0
"""Who has not shown by then that it holds the key is cut off, however it spends the time."""
MOST_STRANGERS: Final = 64
MOST_UNSENT_BYTES: Final = 1 << 20
PAUSE_S: Final = 0.025
_ANYWHERE: Final = ("192.0.2.1", 9)  # an address for documentation: nothing is sent to it


class Peer:
    """What the listener tells of a node; its methods are called by the listener's thread."""

    def welcome(self) -> tuple[Welcome, Orders]:
        """Return what is to be sent when the node has connected, again or for the first time."""
        raise NotImplementedError

    def take(self, batch: Batch) -> int:
        """Take in a batch, once; return the number up to which all have been received."""
        raise NotImplementedError

    def heard(self) -> None:
        """Note a sign of life."""

    def bye(self) -> None:
        """Note that the node has nothing more to say."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_HELLO))
    since_s: float = field(default_factory=time.monotonic)
    challenge: bytes = field(default_factory=nonce)
    peer: Peer | None = None
    unsent: bytearray = field(default_factory=bytearray)

    def put(self, *frames: AnyFrame) -> None:
        for frame in frames:
            self.unsent += to_bytes(frame)
        if len(self.unsent) > MOST_UNSENT_BYTES:
            raise LinkError("it does not read what it is sent")

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.unsent:
                sent = self.socket.send(self.unsent)
                del self.unsent[:sent]

    def send(self, *frames: AnyFrame) -> None:
        self.put(*frames)
        self.flush()


class Listener:
    """Listen at one address for monitors that hold the key."""

    def __init__(
        self,
        host: str,
        key: Key,
        admit: Callable[[Hello], Peer | None],
        *,
        has_room: Callable[[], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Listen at a port that the system chooses.

        `admit` returns the peer for a `Hello` whose proof is right, or None to refuse it; while
        `has_room` is false nothing more is read.

        Raises:
            OSError: the address is not one of this machine.

        """
        self._key = key
        self._admit = admit
        self._has_room = has_room
        self._clock = clock
        self._server = _bind(host)
        self.host, self.port = self._server.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._outbox: list[AnyFrame] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def tell(self, frame: AnyFrame) -> None:
        """Send a frame to every node that is connected."""
        with self._lock:
            self._outbox.append(frame)

    def close(self) -> None:
        """Send what is still to be sent, and cut all connections."""
        self._is_closing.set()
        self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._turn()
            self._send_all()
        finally:
            for connection in tuple(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._server.close()

    def _turn(self) -> None:
        readable = self._selector.select(PAUSE_S)
        has_room = self._has_room()
        for key, _ in readable:
            connection = self._connections.get(key.data)
            if key.fileobj is self._server:
                self._accept()
            elif connection is not None and (has_room or connection.peer is None):
                self._guarded(connection, self._receive)
        if readable and not has_room:
            time.sleep(PAUSE_S)
        self._send_all()
        self._drop_strangers()

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:
            time.sleep(PAUSE_S)  # no descriptor is free: it would be tried again at once
            return
        accepted.setblocking(False)
        with suppress(OSError):  # it is closed already
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._connections[accepted] = _Connection(accepted)
        self._selector.register(accepted, selectors.EVENT_READ, accepted)
        self._guarded(connection, lambda each: each.send(Challenge(each.challenge)))

    def _drop_strangers(self) -> None:
        strangers = [c for c in self._connections.values() if c.peer is None]
        late = time.monotonic() - HANDSHAKE_S
        for number, connection in enumerate(reversed(strangers)):
            if connection.since_s < late or number >= MOST_STRANGERS:
                self._drop(connection)

    def _guarded(self, connection: _Connection, act: Callable[[_Connection], None]) -> None:
        """Cut a connection that fails or whose other end does not speak as it should."""
        try:
            act(connection)
        except BlockingIOError:
            return
        except (OSError, LinkError):
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(READ_BYTES)
        if not data:
            raise LinkError("the connection was closed")
        for frame in connection.reader.feed(data):
            self._answer(connection, frame)
        connection.flush()
        if connection.peer is not None:
            connection.peer.heard()

    def _answer(self, connection: _Connection, frame: AnyFrame) -> None:
        peer = connection.peer
        if peer is None:
            self._shake_hands(connection, frame)
            return
        match frame:
            case Ping():
                connection.put(Pong(frame.sent_ns, self._clock()))
            case Batch():
                connection.put(Ack(peer.take(frame)))
            case Bye():
                peer.bye()
            case _:
                raise LinkError(f"{type(frame).__name__} was not expected")

    def _shake_hands(self, connection: _Connection, frame: AnyFrame) -> None:
        challenge = connection.challenge
        if not isinstance(frame, Hello) or not hmac.compare_digest(
            frame.proof, frame.prove(self._key, challenge)
        ):
            raise LinkError("it does not hold the key")
        connection.peer = self._admit(frame)
        if connection.peer is None:
            raise LinkError("these ranks are not expected")
        connection.reader.limit = MAX_FRAME
        for other in tuple(self._connections.values()):
            if other is not connection and other.peer is connection.peer:
                self._drop(other)  # the one that it had before
        welcome, orders = connection.peer.welcome()
        proof = welcome.prove(self._key, challenge, frame.nonce)
        connection.put(msgspec.structs.replace(welcome, proof=proof), orders)

    def _send_all(self) -> None:
        with self._lock:
            frames, self._outbox = self._outbox, []
        for connection in tuple(self._connections.values()):
            if connection.peer is not None and (frames or connection.unsent):
                self._guarded(connection, lambda each: each.send(*frames))

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


def listen_host(master_addr: str) -> str:
    """Return the address of this machine at which the other nodes of the job find it.

    That is where `MASTER_ADDR` leads. A host name may lead to the machine's own loopback in its own
    eyes only; then it is the address from which it reaches others.
    """
    if not master_addr:
        return "127.0.0.1"
    if master_addr == "localhost" or _is_address(master_addr):
        return master_addr
    found = [info[4][0] for info in socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)]
    outside = [str(host) for host in found if not ipaddress.ip_address(host).is_loopback]
    if outside:
        return outside[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)
        return str(probe.getsockname()[0])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bind(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    server = socket.create_server(address[:2], family=family)
    server.setblocking(False)
    return server


# The source of the events of all other nodes.

MOST_QUEUED_BYTES: Final = 64 << 20
"""What was received and not yet polled; beyond that the nodes have to wait."""
RECORD_BYTES: Final = 100
"""So much a record takes in memory besides what it holds: a tuple and an object of bytes."""
FRESH_NS: Final = 3_000_000_000
"""A node that has sent all it had not longer ago than this is in sight."""
LOST_NS: Final = 20_000_000_000
"""A node of which nothing was heard for so long is not observed any more."""
CONNECT_NS: Final = 120_000_000_000
"""A node that has not connected by then is not observed."""

_NEVER_CAME: Final = "the monitor of its node has not reached the one on the node of rank 0"
_WENT_AWAY: Final = "the monitor of its node was not heard of any more"


class TcpSource(EventSource):
    """Receive the events of ranks that run on other nodes, and tell their monitors what is wanted.

    The events are those that the nodes' own files hold, and `Heartbeat`, `Exited`, `Stacks` and
    the like of their monitors; all times are those of this machine's monotonic clock. For ranks of
    which nothing is heard for long, it yields `ProbeDisabled`.
    """

    def __init__(
        self,
        host: str,
        ranks: Iterable[int],
        interner: Interner,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Listen at an address of this machine for the monitors of these ranks.

        `interner` is shared with the other sources of the same engine.

        Raises:
            OSError: nobody can listen there.

        """
        self.ranks = RankSet(ranks)
        token = secrets.token_hex(NONCE_BYTES)
        self._interner = interner
        self._clock = clock
        self._began_ns = clock()
        self._nodes: dict[str, _Node] = {}
        self._orders = Orders()
        self._given_up: set[int] = set()
        self._ended: set[int] = set()
        self._queue: deque[tuple[_Node, Batch, int]] = deque()
        self._num_queued_bytes = 0
        self._lock = threading.Lock()
        key = Key(token)
        self._listener = Listener(host, key, self._admit, has_room=self._has_room, clock=clock)
        self.address = ReporterAddress(
            host=self._listener.host, port=self._listener.port, token=token
        )

    # Called by the thread of the listener

    def _has_room(self) -> bool:
        return self._num_queued_bytes < MOST_QUEUED_BYTES

    def _admit(self, hello: Hello) -> Peer | None:
        with self._lock:
            node = self._nodes.get(hello.session)
            if node is not None:
                return node if node.ranks == RankSet(hello.ranks) else None
            taken = {rank for node in self._nodes.values() for rank in node.ranks}
            ranks = RankSet(hello.ranks)
            if not ranks or not ranks <= self.ranks or ranks & taken:
                return None
            node = self._nodes[hello.session] = _Node(self, ranks, hello.hostname)
            return node

    def _enqueue(self, node: _Node, batch: Batch) -> None:
        size = sum(RECORD_BYTES + len(payload) for _, payload in batch.records)
        with self._lock:
            self._num_queued_bytes += size
        self._queue.append((node, batch, size))

    # Called by the monitor

    def poll(self) -> Iterator[Event]:
        """Yield what was received since the last call."""
        for _ in range(len(self._queue)):
            node, batch, size = self._queue.popleft()
            with self._lock:
                self._num_queued_bytes -= size
            for event in node.events(batch):
                if isinstance(event, Exited):
                    self._ended.add(event.rank)
                yield event
        yield from self._give_up(self.lost)

    @property
    def out_of_sight(self) -> RankSet:
        """The ranks of which it is not known what they do now."""
        current = {rank for node in self._all_nodes() if node.is_current for rank in node.ranks}
        return RankSet(set(self.ranks) - current - self._ended)

    @property
    def lost(self) -> RankSet:
        """The ranks that are not observed any more, or never were."""
        now_ns = self._clock()
        nodes = self._all_nodes()
        came = {rank for node in nodes for rank in node.ranks}
        lost = {rank for node in nodes if node.is_lost(now_ns) for rank in node.ranks}
        if now_ns - self._began_ns > CONNECT_NS:
            lost |= set(self.ranks) - came
        return RankSet(lost - self._ended)

    @property
    def connected(self) -> RankSet:
        """The ranks whose node has connected at least once."""
        return RankSet(rank for node in self._all_nodes() for rank in node.ranks)

    @property
    def nodes(self) -> tuple[RankSet, ...]:
        """The ranks of each node that can be asked for something now."""
        now_ns = self._clock()
        nodes = [node for node in self._all_nodes() if not node.is_lost(now_ns)]
        return tuple(node.ranks for node in sorted(nodes, key=lambda node: min(node.ranks)))

    def want(self, orders: Orders) -> None:
        """Tell all nodes what is wanted of them from now on, those that connect later as well."""
        if orders != self._orders:
            self._orders = orders
            self._listener.tell(orders)

    def close(self) -> None:
        """Tell the nodes that nobody listens any more, and stop to listen."""
        self.want(Orders(abort=self._orders.abort, done=True))
        self._listener.close()

    def _all_nodes(self) -> list[_Node]:
        with self._lock:
            return list(self._nodes.values())

    def give_up(self) -> Iterator[ProbeDisabled | NodeLost]:
        """Say of the ranks that are out of sight that what they did is not known: it is the end."""
        yield from self._give_up(self.out_of_sight)

    def _give_up(self, ranks: RankSet) -> Iterator[ProbeDisabled | NodeLost]:
        new = set(ranks) - self._given_up
        if not new:
            return
        self._given_up |= new
        came = set(self.connected)
        for rank in sorted(new):
            reason = _WENT_AWAY if rank in came else _NEVER_CAME
            yield _incomplete(rank, reason, self._clock())
        for node in self._all_nodes():
            yield from node.lost(new - self._ended)


class _Node(Peer):
    """The ranks of one node and how far their events have come."""

    def __init__(self, source: TcpSource, ranks: RankSet, hostname: str) -> None:
        self.ranks = ranks
        self.hostname = hostname
        self._source = source
        self._received = 0
        self._is_gone = False
        self._heard_ns = self._current_ns = source._clock()
        self._decoders = {rank: EventDecoder(rank, source._interner) for rank in ranks}
        self._damaged: set[int] = set()

    def welcome(self) -> tuple[Welcome, Orders]:
        self.heard()
        return Welcome(self._received), self._source._orders

    def heard(self) -> None:
        self._heard_ns = self._source._clock()

    def bye(self) -> None:
        self._is_gone = True

    def take(self, batch: Batch) -> int:
        if batch.number == self._received + 1:
            self._received = batch.number
            self._source._enqueue(self, batch)
            if batch.is_all:
                self._current_ns = self._source._clock()
        return self._received

    @property
    def is_current(self) -> bool:
        return self._is_gone or self._source._clock() - self._current_ns < FRESH_NS

    def is_lost(self, now_ns: int) -> bool:
        return not self._is_gone and now_ns - self._heard_ns > LOST_NS

    def lost(self, ranks: Iterable[int]) -> Iterator[NodeLost]:
        """Say of its ranks among these that nothing is heard of them any more."""
        silent_s = (self._source._clock() - self._heard_ns) / 1e9
        for rank in sorted(self.ranks & RankSet(ranks)):
            yield NodeLost(
                rank=rank,
                seq=-1,
                time_ns=self._heard_ns,
                hostname=self.hostname,
                silent_s=silent_s,
            )

    def events(self, batch: Batch) -> Iterator[Event]:
        """Decode a batch, with its times as this machine's clock tells them."""
        for rank, payload in batch.records:
            try:
                event = self._decode(rank, payload)
                event = event and shifted(event, batch.offset_ns)
            except DamagedFileError as error:
                if rank in self.ranks and rank not in self._damaged:
                    self._damaged.add(rank)
                    yield _incomplete(rank, str(error), self._source._clock())
                continue
            if event is not None:
                yield event

    def _decode(self, rank: int, payload: bytes) -> Event | None:
        if rank not in self.ranks:
            raise DamagedFileError(f"{self.hostname} sent an event of rank {rank}")
        event = self._decoders[rank].decode(payload)
        if event is not None and event.rank != rank:
            raise DamagedFileError(f"{self.hostname} sent an event of rank {event.rank}")
        return event


def _incomplete(rank: int, reason: str, now_ns: int) -> ProbeDisabled:
    return ProbeDisabled(rank=rank, seq=-1, time_ns=now_ns, probe="event-file", reason=reason)
