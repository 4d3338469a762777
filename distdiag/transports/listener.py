"""The reporter's end of the connections: a thread that speaks the frames with every node.

It answers pings at once, whatever the monitor is busy with, because clocks are compared by them.
"""

from __future__ import annotations

import hmac
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from distdiag.transports.frames import (
    MAX_FRAME,
    MAX_HELLO,
    Ack,
    AnyFrame,
    Batch,
    Bye,
    FrameReader,
    Hello,
    LinkError,
    Ping,
    Pong,
    to_bytes,
)

READ_BYTES: Final = 1 << 18
HANDSHAKE_S: Final = 5.0
"""Who has not shown the token by then is cut off."""
MOST_STRANGERS: Final = 64
MOST_UNSENT_BYTES: Final = 1 << 20
PAUSE_S: Final = 0.025
_ANYWHERE: Final = ("192.0.2.1", 9)  # an address for documentation: nothing is sent to it


class Peer:
    """What the listener tells of a node; its methods are called by the listener's thread."""

    def welcome(self) -> list[AnyFrame]:
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
    peer: Peer | None = None
    unsent: bytearray = field(default_factory=bytearray)


class Listener:
    """Listen at one address for monitors that hold the token."""

    def __init__(
        self,
        host: str,
        token: str,
        admit: Callable[[Hello], Peer | None],
        *,
        has_room: Callable[[], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Listen at a port that the system chooses.

        `admit` returns the peer for a `Hello` whose token is right, or None to refuse it; while
        `has_room` is false nothing more is read.

        Raises:
            OSError: the address is not one of this machine.

        """
        self._token = token
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
        with suppress(OSError):
            accepted, _ = self._server.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[accepted] = _Connection(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, accepted)

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
        if connection.peer is not None:
            connection.peer.heard()

    def _answer(self, connection: _Connection, frame: AnyFrame) -> None:
        peer = connection.peer
        if peer is None:
            self._shake_hands(connection, frame)
            return
        match frame:
            case Ping():
                self._send(connection, Pong(frame.sent_ns, self._clock()))
            case Batch():
                self._send(connection, Ack(peer.take(frame)))
            case Bye():
                peer.bye()
            case _:
                raise LinkError(f"{type(frame).__name__} was not expected")

    def _shake_hands(self, connection: _Connection, frame: AnyFrame) -> None:
        if not isinstance(frame, Hello) or not hmac.compare_digest(
            frame.token.encode(), self._token.encode()
        ):
            raise LinkError("the token is missing")
        connection.peer = self._admit(frame)
        if connection.peer is None:
            raise LinkError("these ranks are not expected")
        connection.reader.limit = MAX_FRAME
        for other in tuple(self._connections.values()):
            if other is not connection and other.peer is connection.peer:
                self._drop(other)  # the one that it had before
        for answer in connection.peer.welcome():
            self._send(connection, answer)

    def _send(self, connection: _Connection, frame: AnyFrame) -> None:
        connection.unsent += to_bytes(frame)
        if len(connection.unsent) > MOST_UNSENT_BYTES:
            raise LinkError("it does not read what it is sent")
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        with suppress(BlockingIOError):
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]

    def _send_all(self) -> None:
        with self._lock:
            frames, self._outbox = self._outbox, []
        for connection in tuple(self._connections.values()):
            if connection.peer is None:
                continue
            for frame in frames:
                connection.unsent += to_bytes(frame)
            if connection.unsent:
                self._guarded(connection, self._flush)

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
