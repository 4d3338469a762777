"""The other nodes of a job, as the monitor on the node of rank 0 knows them."""

import time
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from distdiag.engine.rank_status import RankStatuses
from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome
from distdiag.record.run_dir import Launch, RunDir, write_atomically
from distdiag.record.wire import Interner
from distdiag.reports.builder import say
from distdiag.transports.base import EventSource
from distdiag.transports.frames import Orders
from distdiag.transports.tcp import TcpSource, listen_host

STRANGER_S: Final = 9.0
"""When all ranks of this node have ended, a node that has never connected has so long to do so."""
STRANGER_AFTER_FAILURE_S: Final = 2.0
"""Where a rank failed, somebody waits for the end."""


class OtherNodes(EventSource):
    """The ranks of other nodes and what their monitors send; on a single node there are none."""

    def __init__(self, source: TcpSource | None, problem: str = "") -> None:
        """Know them by this source; `problem` is why there is none although there are nodes."""
        self.source = source
        self.problem = problem
        self.ranks = source.ranks if source is not None else RankSet()
        self._heard: set[int] = set()
        self._alone_s = 0.0

    def poll(self) -> Iterator[Event]:
        """Yield what was received since the last call."""
        for event in self.source.poll() if self.source is not None else ():
            self._heard.add(event.rank)
            yield event

    @property
    def lost(self) -> RankSet:
        """The ranks that are not observed any more."""
        return self.source.lost if self.source is not None else RankSet()

    @property
    def out_of_sight(self) -> frozenset[int]:
        """The ranks of which nobody knows what they do now."""
        return frozenset(self.source.out_of_sight) if self.source is not None else frozenset()

    def is_early(self, here: Iterable[int], status: RankStatuses) -> bool:
        """Whether all that came have ended, `here` and elsewhere, and others may be on their way.

        Who is silent, and who was missed by whom, is then reported at the end.
        """
        if not self.ranks or not self._heard.union(here) <= set(status.over):
            return False
        return bool(set(self.ranks) - self._heard)

    def may_go_on(self, status: RankStatuses) -> bool:
        """Whether something of them is still to come, now that all ranks of this node are over."""
        if self.source is None:
            return False
        now_s = time.monotonic()
        self._alone_s = self._alone_s or now_s
        awaited = set(self.ranks) - set(status.over) - set(self.lost)
        is_well = status.outcome is Outcome.RUNNING
        if now_s - self._alone_s > (STRANGER_S if is_well else STRANGER_AFTER_FAILURE_S):
            awaited &= set(self.source.connected)
        return bool(awaited)

    def end(self) -> Iterator[Event]:
        """Say of whom it is not known what they did last."""
        if self.source is not None:
            yield from self.source.give_up()

    def want(self, orders: Orders) -> None:
        """Tell all nodes what is wanted of them from now on."""
        if self.source is not None:
            self.source.want(orders)

    def close(self) -> None:
        """Tell the nodes that nobody listens any more."""
        if self.source is not None:
            self.source.close()


def listen_for_others(run_dir: RunDir, launch: Launch, interner: Interner) -> OtherNodes:
    """Listen for the monitors of other nodes if there are any, and leave the address in a file.

    Where that fails it is said on stderr.
    """
    ranks = RankSet(set(range(launch.world_size)) - set(launch.local_ranks))
    if not ranks:
        return OtherNodes(None)
    try:
        source = TcpSource(listen_host(launch.master_addr), ranks, interner)
        write_atomically(run_dir.reporter, msgspec.json.encode(source.address))
    except OSError as error:
        problem = f"this node cannot listen at MASTER_ADDR {launch.master_addr!r}: {error}"
        say(f"distdiag: {ranks.phrase()} cannot be compared: {problem}\n")
        return OtherNodes(None, problem)
    return OtherNodes(source)
