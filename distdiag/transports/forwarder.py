"""A node's end of the connection to the reporter: a thread that sends and never loses its place."""

from __future__ import annotations

import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from distdiag.any_event import AnyEvent
from distdiag.errors import DamagedFileError
from distdiag.ranks import RankSet
from distdiag.run_dir import ReporterAddress
from distdiag.transports.frames import (
    Ack,
    AnyFrame,
    Bye,
    Hello,
    LinkError,
    Orders,
    Ping,
    Pong,
    Welcome,
)
from distdiag.transports.link import SILENCE_S, ClockOffset, Link
from distdiag.transports.outbox import Outbox

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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin to send; `address` is asked until it knows where the reporter listens."""
        self.orders = Orders()
        self.problem = "where it listens has not become known"
        self.has_connected = False
        self._outbox = outbox
        self._ranks = ranks
        self._address = address
        self._clock = clock
        self._session = secrets.token_hex(8)
        self._offset = ClockOffset()
        self._sent_s = self._pinged_s = 0.0
        self._pause_s = RETRY_S
        self._is_closing = threading.Event()
        self._is_cut = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    def put(self, event: AnyEvent) -> None:
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
            self._introduce(link, address.token)
            for frame in link.measure(self._offset):
                self._take(frame)
            self.has_connected = True
            self._pause_s = RETRY_S
            for batch in self._outbox.unacknowledged():
                link.send(batch)
            return self._send_all(link)

    def _introduce(self, link: Link, token: str) -> None:
        link.send(Hello(token, self._session, platform.node(), tuple(self._ranks)))
        frame = link.next_frame()
        if not isinstance(frame, Welcome):
            raise LinkError("the other end did not answer as a reporter does")
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
