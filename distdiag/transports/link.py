"""One connection to the reporter as a node sees it, and the distance of the two clocks."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from distdiag.any_event import AnyEvent
from distdiag.event import Heartbeat
from distdiag.transports.frames import AnyFrame, FrameReader, LinkError, Ping, Pong, to_bytes

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


def shifted(event: AnyEvent, offset_ns: int) -> AnyEvent:
    """Return an event with its times as another clock tells them."""
    if isinstance(event, Heartbeat):
        return msgspec.structs.replace(
            event, time_ns=event.time_ns + offset_ns, beat_ns=event.beat_ns + offset_ns
        )
    return msgspec.structs.replace(event, time_ns=event.time_ns + offset_ns)
