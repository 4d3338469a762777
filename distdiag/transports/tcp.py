"""The events of the ranks of other nodes, as their monitors send them over TCP."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from distdiag.any_event import AnyEvent
from distdiag.errors import DamagedFileError
from distdiag.event import Exited, NodeLost, ProbeDisabled
from distdiag.ranks import RankSet
from distdiag.run_dir import ReporterAddress
from distdiag.transports.base import EventSource
from distdiag.transports.frames import AnyFrame, Batch, Hello, Orders, Welcome
from distdiag.transports.link import shifted
from distdiag.transports.listener import Listener, Peer
from distdiag.wire import Canon, EventDecoder

MOST_QUEUED_BYTES: Final = 64 << 20
"""What was received and not yet polled; beyond that the nodes have to wait."""
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
        canon: Canon,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Listen at an address of this machine for the monitors of these ranks.

        `canon` is shared with the other sources of the same engine.

        Raises:
            OSError: nobody can listen there.

        """
        self.ranks = RankSet(ranks)
        token = secrets.token_hex(16)
        self._canon = canon
        self._clock = clock
        self._began_ns = clock()
        self._nodes: dict[str, _Node] = {}
        self._orders = Orders()
        self._given_up: set[int] = set()
        self._ended: set[int] = set()
        self._queue: deque[tuple[_Node, Batch, int]] = deque()
        self._num_queued_bytes = 0
        self._lock = threading.Lock()
        self._listener = Listener(host, token, self._admit, has_room=self._has_room, clock=clock)
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
        size = sum(len(payload) for _, payload in batch.records)
        with self._lock:
            self._num_queued_bytes += size
        self._queue.append((node, batch, size))

    # Called by the monitor

    def poll(self) -> Iterator[AnyEvent]:
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
        self._decoders = {rank: EventDecoder(rank, source._canon) for rank in ranks}
        self._damaged: set[int] = set()

    def welcome(self) -> list[AnyFrame]:
        self.heard()
        return [Welcome(self._received), self._source._orders]

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

    def events(self, batch: Batch) -> Iterator[AnyEvent]:
        """Decode a batch, with its times as this machine's clock tells them."""
        for rank, payload in batch.records:
            try:
                event = self._decode(rank, payload)
            except DamagedFileError as error:
                if rank in self.ranks and rank not in self._damaged:
                    self._damaged.add(rank)
                    yield _incomplete(rank, str(error), self._source._clock())
                continue
            if event is not None:
                yield shifted(event, batch.offset_ns)

    def _decode(self, rank: int, payload: bytes) -> AnyEvent | None:
        if rank not in self.ranks:
            raise DamagedFileError(f"{self.hostname} sent an event of rank {rank}")
        event = self._decoders[rank].decode(payload)
        if event is not None and event.rank != rank:
            raise DamagedFileError(f"{self.hostname} sent an event of rank {event.rank}")
        return event


def _incomplete(rank: int, reason: str, now_ns: int) -> ProbeDisabled:
    return ProbeDisabled(rank=rank, seq=-1, time_ns=now_ns, probe="event-file", reason=reason)
