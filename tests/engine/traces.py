"""Traces made by hand: what ranks did to files and how they waited for one another."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from distdiag.engine.files.races import FileRaces
from distdiag.events.base import CallSite, Event, Frame
from distdiag.events.collectives import (
    Collective,
    CollectiveState,
    GroupCreated,
    ProcessGroup,
    Signature,
)
from distdiag.events.files import FileAccess, FileAction, FileClosed, HostSynced, StoreCall
from distdiag.events.lifecycle import Raised, RankStarted
from distdiag.events.ranks import RankSet
from distdiag.record.wire import Interner

MESSAGES = ("send", "recv", "recv_any_source")


@dataclass
class Trace:
    """The events of several ranks in the order of the clock, which ticks with every event."""

    num_ranks: int = 2
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ticks = count(1)
        self._interner = Interner()
        self._seq_ids: dict[tuple[str, int], int] = {}

    @property
    def world(self) -> RankSet:
        return RankSet(range(self.num_ranks))

    def add(self, kind: type[Event], rank: int, **fields: object) -> Event:
        tick = next(self._ticks)
        event = kind(rank=rank, seq=tick, time_ns=tick, **fields)
        self.events.append(event)
        return event

    def site(self, line: int) -> CallSite:
        return self._interner(CallSite((Frame("train.py", line, "main"),)))

    def starts(self, rank: int, host: str) -> None:
        self.add(
            RankStarted,
            rank,
            local_rank=0,
            world_size=self.num_ranks,
            hostname=host,
            pid=1,
            python="3.11",
            command=("train.py",),
            unix_ns=0,
        )

    # Calls

    def issue(
        self,
        rank: int,
        op: str = "barrier",
        ranks: tuple[int, ...] | None = None,
        *,
        backend: str = "gloo",
        is_async: bool = False,
        api: str | None = "call",
        **signature: object,
    ) -> Collective:
        members = tuple(range(self.num_ranks)) if ranks is None else ranks
        name = f"{backend}{members}"
        seq_id = -1
        if op not in MESSAGES:
            seq_id = self._seq_ids.get((name, rank), 0)
            self._seq_ids[name, rank] = seq_id + 1
        return self.add(
            Collective,
            rank,
            group=self._interner(ProcessGroup(name, name, members, backend)),
            collective_seq_id=seq_id,
            signature=Signature(op, **signature),
            site=self.site(1),
            is_async=is_async,
            api=api,
        )

    def state(self, call: Collective, state: str) -> None:
        self.add(CollectiveState, call.rank, call=call.seq, state=state)

    def wait(self, call: Collective) -> None:
        self.state(call, "waited")

    def call(self, rank: int, op: str = "barrier", **values: object) -> Collective:
        call = self.issue(rank, op, **values)
        self.state(call, "issued")
        self.wait(call)
        return call

    def everyone(self, op: str = "barrier", **values: object) -> None:
        """All ranks issue a collective, and then all of them have waited for it."""
        members = values.get("ranks") or self.world
        for call in [self.issue(rank, op, **values) for rank in members]:
            self.wait(call)

    def syncs(self, rank: int) -> None:
        self.add(HostSynced, rank, api="torch.cuda.synchronize")

    def creates(self, rank: int, *, done: bool, backend: str = "gloo") -> None:
        self.add(
            GroupCreated,
            rank,
            api="init_process_group",
            ordinal=0,
            scope=tuple(self.world),
            ranks=tuple(self.world),
            desc="",
            generation=0,
            site=self.site(2),
            done=done,
            backend=backend,
        )

    def store(
        self, rank: int, action: str, key: str, value: str = "", *, done: bool = False
    ) -> None:
        self.add(
            StoreCall, rank, action=action, store="host:1", keys=(key,), value=value, done=done
        )

    # Files

    def access(
        self, rank: int, action: str, path: str = "/d/f", line: int = 0, **values: object
    ) -> FileAccess:
        return self.add(
            FileAccess,
            rank,
            action=FileAction(action),
            path=path,
            written=path,
            site=self.site(line or 100 * rank + len(self.events)),
            **values,
        )

    def close(self, access: FileAccess, **values: object) -> None:
        self.add(FileClosed, access.rank, access=access.seq, **values)

    def write(self, rank: int, path: str = "/d/f", line: int = 0) -> None:
        self.close(self.access(rank, "write", path, line, has_end=True))

    def raises(self, rank: int, access: FileAccess, message: str, kind: str = "EOFError") -> Raised:
        """The rank ends by an exception in the line of this access."""
        frames = access.site.user_frames
        return self.add(Raised, rank, type=kind, message=message, frames=frames, traceback="")

    # What comes of it

    def judged(self, order: list[Event] | None = None) -> FileRaces:
        """The races after all events were fed, in this order."""
        races = FileRaces(self.world)
        for number, event in enumerate(self.events if order is None else order):
            races.order.feed(event)
            if number % 3 == 0:
                races.order.advance(0)
        races.finish()
        return races

    @property
    def races(self) -> list:
        return [race for _, race in self.judged().changed()]

    @property
    def conflicts(self) -> list[str]:
        return [race.conflict.value for race in self.races]
