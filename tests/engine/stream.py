"""A run made by hand: events of several ranks, and an engine that judges them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.engine import Engine
from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import (
    Collective,
    CollectiveState,
    GroupCreated,
    ProcessGroup,
    Signature,
)
from distdiag.events.files import StoreAsked, StoreCall
from distdiag.events.lifecycle import Exited, Finished, Heartbeat, Raised, RankStarted
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, Stacks, ThreadStack
from distdiag.findings.finding import Finding, Severity
from distdiag.record.wire import Interner

S = 1_000_000_000


@dataclass
class Job:
    """An engine with a clock of its own, fed call by call."""

    num_ranks: int = 2
    hang_timeout_s: float | None = 5.0
    now_ns: int = S
    checks: list[Check] | None = None
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        world = RankSet(range(self.num_ranks))
        if self.checks is None:
            self.checks = [check() for check in load_checks().values()]
        self.engine = Engine(self.checks, world, hang_timeout_s=self.hang_timeout_s)
        self._seq = count()
        self._interner = Interner()
        self._group_seq: dict[tuple[str, int], int] = {}
        self._used: Counter[tuple[int, str]] = Counter()
        self.num_dumps: Counter[int] = Counter()
        self.engine.tick(self.now_ns)
        for rank in world:
            self.engine.feed(
                RankStarted(
                    rank=rank,
                    seq=next(self._seq),
                    time_ns=self.now_ns,
                    local_rank=rank,
                    world_size=self.num_ranks,
                    hostname="host",
                    pid=100 + rank,
                    python="3.11",
                    command=("train.py",),
                    unix_ns=0,
                )
            )

    def _common(self, rank: int) -> dict[str, int]:
        return {"rank": rank, "seq": next(self._seq), "time_ns": self.now_ns}

    def site(self, line: int, module: str | None = None) -> CallSite:
        torch_frame = Frame("torch/distributed/distributed_c10d.py", 10, "call", user=False)
        return self._interner(
            CallSite((torch_frame, Frame("train.py", line, "main", user=True)), module)
        )

    def call(  # noqa: PLR0913
        self,
        rank: int,
        op: str = "all_reduce",
        line: int = 10,
        size: int = 4,
        group: tuple[int, ...] | None = None,
        *,
        waited: bool = True,
        is_async: bool = False,
        peer: int | None = None,
        tag: int | None = None,
        dtype: str = "float32",
        reduce_op: str | None = None,
        root: int | None = None,
        module: str | None = None,
    ) -> Collective:
        ranks = group or tuple(range(self.num_ranks))
        name = f"g{ranks}"
        seq_id = -1
        if op not in ("send", "recv", "recv_any_source"):
            seq_id = self._group_seq.get((name, rank), 0)
            self._group_seq[name, rank] = seq_id + 1
        event = Collective(
            **self._common(rank),
            group=self._interner(ProcessGroup(name, name, ranks, "gloo")),
            collective_seq_id=seq_id,
            signature=self._interner(
                Signature(
                    op,
                    ((size,),),
                    ((size,),),
                    (dtype,),
                    reduce_op=reduce_op,
                    root=root,
                    peer=peer,
                    tag=tag,
                )
            ),
            site=self.site(line, module),
            is_async=is_async,
            api=op,
        )
        self.engine.feed(event)
        self.state(event, "issued")
        if waited:
            self.state(event, "waited")
        return event

    def state(self, call: Collective, state: str) -> None:
        self.engine.feed(CollectiveState(**self._common(call.rank), call=call.seq, state=state))

    def everyone(self, **call: object) -> None:
        for rank in range(self.num_ranks):
            self.call(rank, **call)

    def new_group(self, rank: int, ranks: tuple[int, ...], line: int = 5) -> None:
        self.engine.feed(
            GroupCreated(
                **self._common(rank),
                api="new_group",
                ordinal=0,
                scope=tuple(range(self.num_ranks)),
                ranks=ranks,
                desc="",
                generation=0,
                site=self.site(line),
            )
        )

    def beat(
        self,
        rank: int,
        *,
        cpu_s: float = 0.0,
        batches: int = 0,
        phase: Phase = Phase.SCRIPT,
        **family: float,
    ) -> None:
        self.engine.feed(
            Heartbeat(
                **self._common(rank),
                phase=phase,
                beat_ns=self.now_ns,
                cpu_s=cpu_s,
                num_batches=batches,
                **family,
            )
        )

    def sets(self, rank: int, key: str, line: int = 20) -> None:
        frames = (Frame("train.py", line, "main"),)
        self.engine.feed(
            StoreCall(**self._common(rank), action="set", store="s", keys=(key,), frames=frames)
        )

    def asks(self, rank: int, key: str, line: int = 12, *, thread: str = "MainThread") -> None:
        frames = (Frame("train.py", line, "main"),)
        asked = StoreAsked(
            **self._common(rank), action="get", store="s", keys=(key,), frames=frames, thread=thread
        )
        self.engine.feed(asked)

    def gets(self, rank: int, key: str) -> None:
        self.engine.feed(
            StoreCall(**self._common(rank), action="get", store="s", keys=(key,), done=True)
        )

    def finishes(self, rank: int, exit_status: int = 0) -> None:
        self.engine.feed(Finished(**self._common(rank), exit_status=exit_status))

    def raises(self, rank: int, line: int = 30, message: str = "bad batch") -> None:
        frames = (Frame("train.py", line, "main", user=True),)
        self.engine.feed(
            Raised(
                **self._common(rank),
                type="ValueError",
                message=message,
                frames=frames,
                traceback="",
            )
        )

    def dies(self, rank: int, status: int | None = None) -> None:
        self.engine.feed(Exited(**self._common(rank), status=status))

    def passes(
        self,
        seconds: float,
        *,
        cpu: dict[int, float] | None = None,
        children: dict[int, float] | None = None,
        io: dict[int, int] | None = None,
        at: dict[int, tuple[Frame, ...]] | None = None,
        ready: tuple[int, ...] = (),
    ) -> None:
        """Let time pass in steps of half a second.

        `cpu` and `children` are what ranks and their child processes use of it, as a share, `io`
        what they read and write in a second; `at` are the stacks of their main threads. The kernel
        sees the `ready` ones wait for a processor whenever it is asked.
        """
        start = self.now_ns
        while self.now_ns < start + seconds * S:
            self.now_ns += S // 2
            for rank in {**(cpu or {}), **(children or {}), **(io or {})}:
                self._used[rank, "cpu"] += (cpu or {}).get(rank, 0.0) / 2
                self._used[rank, "children"] += (children or {}).get(rank, 0.0) / 2
                self._used[rank, "io"] += (io or {}).get(rank, 0) / 2
                self.beat(
                    rank,
                    cpu_s=self._used[rank, "cpu"],
                    children_cpu_s=self._used[rank, "children"],
                    num_children=2,
                    io_bytes=int(self._used[rank, "io"]),
                )
            self.engine.tick(self.now_ns)
            for rank in self.engine.evidence_wanted:
                self._dump(rank, (at or {}).get(rank), "R" if rank in ready else "S")

    def _dump(self, rank: int, frames: tuple[Frame, ...] | None, state: str) -> None:
        self.num_dumps[rank] += 1
        self.engine.feed(
            Observed(**self._common(rank), source="kernel", summary="", values={"state": state})
        )
        threads = (ThreadStack("MainThread", frames),) if frames else ()
        error = "" if frames else "no"
        self.engine.feed(
            Stacks(**self._common(rank), source="py-spy", threads=threads, error=error)
        )

    @property
    def alarms(self) -> list[Finding]:
        return [f for f in self.engine.findings if f.severity is not Severity.INFO]

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.alarms]
