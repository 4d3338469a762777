"""How the reporter gets what all nodes saw of a hang: by carriers, over TCP, or not at all.

Each way has a deadline, and when one fails the next takes its place: carriers, then the connections
of the monitors, then the nodes' own disks, where everything is kept in any case.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from distdiag.config import DumpTransport
from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.record.wire import Interner
from distdiag.transports.carriers import (
    CarriageError,
    Carriers,
    pack,
    plan_carriage,
    unpack,
    usable_backend,
)
from distdiag.transports.frames import Carriage, Orders
from distdiag.transports.tcp import TcpSource

_log = logging.getLogger(__name__)

CARRY_S: Final = 8.0
"""Carriers have so long; what they do not bring must still come over TCP before the verdict."""


class DumpTransporter:
    """Ask for the evidence of a hang, and bring it here."""

    def __init__(
        self,
        folder: Path,
        choice: DumpTransport,
        local: RankSet,
        others: TcpSource | None,
        interner: Interner,
    ) -> None:
        """Bring evidence of the `local` ranks and of those of `others`; files go below `folder`."""
        self._folder = folder
        self._choice = choice
        self._local = local
        self._others = others
        self._interner = interner
        self._wanted: frozenset[int] = frozenset()
        self._num_carriages = 0
        self._carriage: Carriage | None = None
        self._carriers: Carriers | None = None
        self._held: tuple[Event, ...] = ()
        self._is_waiting = False
        self._has_asked_others = False
        self._carried_by = ""
        self._problem = ""
        self._sent: set[int] = set()

    @property
    def way(self) -> str:
        """By which way evidence came from elsewhere, as the report says it; empty if by none."""
        ways = [self._carried_by] if self._carried_by else []
        ways += ["tcp"] if self._sent else []
        if self._has_asked_others and not ways:
            ways = ["files: it is kept in the run directories of the nodes"]
        if self._problem:
            return f"{' and '.join(ways) or 'none'} (carriers: {self._problem})"
        return " and ".join(ways)

    def ask(self, ranks: Iterable[int]) -> RankSet:
        """Ask for the evidence of these ranks; return those of this node that are to be seen now.

        To be called again with those that are still wanted, and with none when none are.
        """
        wanted = frozenset(ranks)
        new, self._wanted = wanted - self._wanted, wanted
        if new:
            self._has_asked_others |= not new <= frozenset(self._local)
            self._carriage = self._start_carriers(new)
        if self._others is not None:
            keep = self._choice == "files"
            self._others.want(Orders(tuple(sorted(wanted)), keep, self._carriage))
        return RankSet(new & frozenset(self._local))

    def _start_carriers(self, ranks: frozenset[int]) -> Carriage | None:
        groups = self._groups(ranks)
        if not groups or self._carriers is not None:
            return None
        host = self._others.address.host if self._others is not None else "127.0.0.1"
        self._num_carriages += 1
        folder = self._folder / f"carriage-{self._num_carriages}"
        try:
            carriage, meeting = plan_carriage(
                host, groups, backend=usable_backend(), deadline_s=CARRY_S
            )
            self._carriers = Carriers(folder, carriage, self._local, meeting=meeting)
            self._is_waiting = True
        except OSError as error:
            self._problem = str(error)
            return None
        return carriage

    def _groups(self, ranks: frozenset[int]) -> list[tuple[int, ...]]:
        """Return the ranks of each carrier, those of this node first; none if none are needed."""
        nodes = self._others.nodes if self._others is not None else ()
        here = tuple(sorted(ranks & frozenset(self._local)))
        there = [tuple(sorted(ranks & frozenset(node))) for node in nodes]
        there = [group for group in there if group]
        if self._choice == "nccl":
            singles: list[tuple[int, ...]] = [(r,) for group in (here, *there) for r in group]
            return singles if here else [(), *singles]
        if self._choice == "auto" and there and usable_backend() == "nccl":
            return [here, *there]
        return []

    def pass_on(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """Give what was seen on this node to its carriers; return what needs none."""
        if self._carriers is None or not self._is_waiting:
            return events
        self._is_waiting = False
        is_carried = self._choice == "nccl"
        ranks = {event.rank for event in events} if is_carried else set()
        try:
            self._carriers.load({r: pack(e for e in events if e.rank == r) for r in ranks})
        except OSError as error:
            self._problem = str(error)
            return events
        if not is_carried:
            return events
        self._held = events
        return ()

    def saw(self, event: Event) -> None:
        """Note an event that came from another node over TCP."""
        if isinstance(event, Stacks) and not event.error:
            self._sent.add(event.rank)

    def poll(self) -> Iterator[Event]:
        """Yield what carriers have brought, when they are done."""
        if self._carriers is None or not self._carriers.is_over:
            return
        carriers, self._carriers = self._carriers, None
        held, self._held = self._held, ()
        try:
            arrived = carriers.result()
            events = [e for rank in arrived for e in unpack(rank, arrived[rank], self._interner)]
        except (CarriageError, DamagedFileError) as error:
            _log.warning("the carriers failed: %s", error)
            self._problem = str(error)
            yield from held  # other nodes send theirs by themselves
            return
        self._carried_by = carriers.carriage.backend
        shutil.rmtree(carriers.folder, ignore_errors=True)
        yield from events

    def close(self) -> None:
        """End the carriers that still run."""
        if self._carriers is not None:
            self._carriers.kill()
