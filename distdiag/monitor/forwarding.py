"""The monitor of a node without rank 0: it sends what it sees to the monitor of rank 0's node.

What it sends lies on this node's disk as well, and stays there if the other one is out of reach.
"""

import logging
import platform
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from distdiag.config import Config
from distdiag.engine.rank_status import RankStatuses
from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, Stacks
from distdiag.monitor.local_ranks import LocalRanks
from distdiag.monitor.takeover import Takeover
from distdiag.record.guard import Guard
from distdiag.record.run_dir import LaunchFile, RunDir, read_reporter_address, write_atomically
from distdiag.record.wire import Interner
from distdiag.reports.builder import say
from distdiag.transports.carriers import CarriageError, Carriers, pack
from distdiag.transports.forwarder import Forwarder, Outbox, shifted
from distdiag.transports.frames import Orders
from distdiag.transports.journal import Journal

_log = logging.getLogger(__name__)

HANG_DUMP_S: Final = 8.0
"""A little less than the reporter waits for the stacks of a hang."""
FLUSH_S: Final = 10.0
"""When all ranks are gone, what is left to be sent has so long to arrive."""
FIRST_CONTACT_S: Final = 4.0
"""So long may it take if there never was a connection."""


class ForwardingMonitor:
    """The watch over the ranks of one node, for somebody else who compares them."""

    def __init__(
        self,
        run_dir: RunDir,
        launch_file: LaunchFile,
        config: Config,
        before: Takeover,
    ) -> None:
        self._run_dir = run_dir
        self._local = LocalRanks(run_dir, launch_file, config, Interner())
        self._status = RankStatuses(self._local.ranks)
        self._journal = Journal(run_dir.journal)
        self._forwarder = Forwarder(
            Outbox(run_dir, self._local.ranks),
            self._local.ranks,
            lambda: read_reporter_address(run_dir),
            # Not into the journal: where files are read later, no offset is known.
            first_words=lambda error_ns: (self._local.clock(error_ns),),
        )
        for event in before.seen(Interner()):
            self._forwarder.put(event)
        self._evidence = Evidence(run_dir, self._local.ranks, self._forwarder)
        self._wanted: frozenset[int] = frozenset()
        self._has_aborted = False

    def run(self) -> None:
        """Watch until the ranks have ended and everything was sent, or cannot be sent."""
        with Guard(self._go_on_without):
            self._attend()
        self._conclude()

    def _go_on_without(self, error: Exception) -> None:
        """Say that the monitor failed; the ranks' own records are still sent."""
        _log.error("the monitor failed", exc_info=error)
        say(
            f"distdiag: the monitor of {self._local.ranks.phrase()} failed: "
            f"{type(error).__name__}: {error}\n"
        )
        for end in self._local.ends():
            self._pass_on(end)

    def _attend(self) -> None:
        while True:
            has_news = self._look()
            if self._local.are_over(RankSet(self._status.gone | self._status.unobserved)):
                return
            self._local.wait(self._status.gone, has_news=has_news)

    def _look(self) -> bool:
        has_news = False
        for event in self._local.poll():
            self._status.feed(event)
            if event.seq < 0:
                self._pass_on(event)
            has_news = has_news or event.seq >= 0
        if not self._has_aborted:
            for event in self._local.see_last(self._status):
                self._pass_on(event)
        for rank in self._local.unanswered(self._status):
            with suppress(OSError):
                write_atomically(self._run_dir.ack(rank), b"")
        self._obey()
        return has_news

    def _pass_on(self, event: Event) -> None:
        self._journal.write(event)
        self._forwarder.put(event)

    def _obey(self) -> None:
        orders = self._forwarder.orders
        if orders.abort and not self._has_aborted:
            self._has_aborted = True
            self._local.kill(self._status.gone)
        wanted = frozenset(orders.stacks) & frozenset(self._local.ranks)
        new, self._wanted = wanted - self._wanted, wanted
        if new:
            self._evidence.prepare(orders)
            events = tuple(self._local.see(new, HANG_DUMP_S))
            for event in events:
                self._journal.write(event)
            self._evidence.send(events)
        self._evidence.look()

    def _conclude(self) -> None:
        self._evidence.close()
        timeout_s = FLUSH_S if self._forwarder.has_connected else FIRST_CONTACT_S
        if self._forwarder.finish(timeout_s) or self._forwarder.orders.done:
            return
        say(
            f"distdiag: what {self._local.ranks.phrase()} did could not all be sent to the monitor "
            f"on the node of rank 0 ({self._forwarder.problem}); it is kept in "
            f"{self._run_dir.folder}\n"
        )


class Evidence:
    """What this node saw of a hang, on its way to the reporter."""

    def __init__(self, run_dir: RunDir, ranks: RankSet, forwarder: Forwarder) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._forwarder = forwarder
        self._num_carriages = 0
        self._orders = Orders()
        self._carriers: Carriers | None = None
        self._carried: tuple[Event, ...] = ()

    def prepare(self, orders: Orders) -> None:
        """Start what these orders need, while the evidence is being taken."""
        self._orders = orders
        if orders.carriage is None or self._carriers is not None:
            return
        self._num_carriages += 1
        folder = self._run_dir.folder / f"carriage-{self._num_carriages}"
        try:
            self._carriers = Carriers(folder, orders.carriage, self._ranks)
        except OSError as error:
            _log.warning("the carriers could not be started: %s", error)

    def send(self, events: tuple[Event, ...]) -> None:
        """Send the evidence by the way that was prepared."""
        if self._orders.keep:
            for event in events:
                self._forwarder.put(_kept(event, self._run_dir.journal))
            return
        if self._carriers is None or not self._load(self._carriers, events):
            self._send_all(events)

    def _load(self, carriers: Carriers, events: tuple[Event, ...]) -> bool:
        here = [shifted(event, self._forwarder.offset_ns) for event in events]
        try:
            carriers.load({r: pack(e for e in here if e.rank == r) for r in self._ranks})
        except OSError as error:
            _log.warning("the carriers could not be loaded: %s", error)
            return False
        self._carried += events
        return True

    def look(self) -> None:
        """Send over the forwarder what carriers have failed to bring."""
        if self._carriers is None or not self._carriers.is_over:
            return
        carriers, self._carriers = self._carriers, None
        carried, self._carried = self._carried, ()
        try:
            carriers.result()
        except CarriageError as error:
            _log.warning("the carriers failed: %s", error)
            self._send_all(carried)
        else:
            shutil.rmtree(carriers.folder, ignore_errors=True)

    def _send_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._forwarder.put(event)

    def close(self) -> None:
        """End the carriers that still run."""
        if self._carriers is not None:
            self._carriers.kill()


def _kept(event: Event, path: Path) -> Event:
    """Return what is sent instead of evidence that stays where it is."""
    if not isinstance(event, Stacks | Observed):
        return event
    error = f"it is kept on {platform.node()} in {path} (--dump-transport files)"
    if isinstance(event, Stacks):
        return msgspec.structs.replace(event, threads=(), error=error)
    return msgspec.structs.replace(event, summary="", values={}, processes=(), error=error)
