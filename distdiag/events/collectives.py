"""What probes observe of collectives and of the process groups in which they run."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from distdiag.events.base import CallSite, Event

Sizes = tuple[tuple[int, ...], ...]

UNNUMBERED: Final = 1 << 62
"""The number of a call that comes after all others of its group, and whose own nobody told."""

WITHOUT_PROCESSES: Final = ("fake", "threaded")
"""Backends of torch in whose groups no process stands behind a rank."""

_BLOCKING_EVERYWHERE: Final = frozenset({"barrier", "monitored_barrier"})
_ON_STREAMS: Final = ("nccl", "rccl", "xccl", "hccl", "cncl", "mccl", "eccl", "ucc")
"""Backends whose collectives order the device's streams and not the host."""
_JOIN: Final = "torch/distributed/algorithms/join.py"
"""The file of torch's `Join`, whose exit makes the calls that other ranks still make."""


class ProcessGroup(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A process group as one rank knows it.

    `ranks` are global ranks in group order. `generation` counts the initialisations of the default
    group, since names are used again after `destroy_process_group`.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    generation: int = 0

    @property
    def label(self) -> str:
        """The group's description if it has one, else its name."""
        return group_label(self.name, self.desc)


def blocks_host(group: ProcessGroup, op: str) -> bool:
    """Whether waiting for such a call keeps the Python thread until it is over."""
    if op in _BLOCKING_EVERYWHERE or "gloo" in group.backend:
        return True
    return not any(name in group.backend for name in _ON_STREAMS)


def group_label(name: str, desc: str) -> str:
    """Return what a process group is called: its description if it has one, else its name."""
    return desc if desc and desc != "undefined" else name


class Signature(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """What a collective or point-to-point call asks for.

    `op` is the name of the public torch function (``all_gather_into_tensor``). `root` and `peer`
    are global ranks. `input_splits` and `output_splits` count rows of dim 0. `reduce_op` is None
    where the call did not pass through Python (DDP's reducer).
    """

    op: str
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


def stands_in(site: CallSite) -> bool:
    """Whether `Join` makes a call for a rank without inputs, wherever other ranks make theirs."""
    return any(frame.file.endswith(_JOIN) and frame.function == "__exit__" for frame in site.frames)


class GroupCreated(Event, frozen=True, kw_only=True):
    """A call that creates or destroys process groups, made by all `scope` ranks in one order.

    `ordinal` numbers these calls within `scope`. `ranks` are those asked for, in the order given;
    `done` is false while the call has not returned (`GroupCreated` is written before and after);
    `thread` is the name of the one that makes it. `name` is that of the new group, once it is made
    and if this rank is in it.
    """

    api: str
    ordinal: int
    scope: tuple[int, ...]
    ranks: tuple[int, ...]
    desc: str
    generation: int
    site: CallSite
    done: bool = False
    timeout_s: float | None = None
    backend: str = ""
    thread: str = "MainThread"
    name: str = ""

    @property
    def has_processes(self) -> bool:
        """Whether a process stands behind each rank, which torch's fake and threaded groups lack.

        What destroys a group names no backend.
        """
        return bool(self.backend) and not any(kind in self.backend for kind in WITHOUT_PROCESSES)


class Collective(Event, frozen=True, kw_only=True):
    """A collective or point-to-point call, written before it was issued.

    Example: ``Collective(rank=1, seq=42, time_ns=…, group=ProcessGroup("0", "default_pg", (0, 1),
    "gloo"), collective_seq_id=7, signature=Signature("all_reduce", ((4,),), …), site=…)``.
    `collective_seq_id` counts the collectives of the group; point-to-point calls have -1 and are
    matched by peer and tag. `api` is the function that the user or a framework called, where known.
    """

    group: ProcessGroup
    collective_seq_id: int
    signature: Signature
    site: CallSite
    is_async: bool = False
    thread: str = "MainThread"
    api: str | None = None


class CollectiveState(Event, frozen=True, kw_only=True):
    """The call with event number `call` went on.

    issued: the backend took it. waited: the host waited for it. completed: the backend says so.
    failed: issuing or waiting raised. dropped: its Work was released and nobody had waited for it.
    """

    call: int
    state: Literal["issued", "waited", "completed", "failed", "dropped"]


class BufferChanged(Event, frozen=True, kw_only=True):
    """The program changed what the call with event number `call` sends, and did not wait before.

    Written when it waits, at `site`. `num_changes` counts operations in place since the call began.
    """

    call: int
    num_changes: int
    device: str
    site: CallSite


class GroupProgress(Event, frozen=True, kw_only=True):
    """How far a rank is in a process group, as the group itself told; no rank writes it.

    Dumps and messages of a group say it. The collectives after number `completed` have not ended on
    the rank: said before they come. It has called those up to number `enqueued`, whether there are
    records of them or not: said when no more of them come. `started` is the last one that its GPU
    has begun. None: that is not known.
    """

    group: ProcessGroup
    enqueued: int | None = None
    completed: int | None = None
    started: int | None = None
