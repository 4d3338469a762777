"""The active mode ``--strict``: compare a collective over the store before it is issued.

This is the one probe that waits in a training thread (an exception to the first law that the user
asks for). It never waits longer than its timeout, and then lets the collective go on as usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.errors import CollectiveMismatchError
from distdiag.events.ranks import RankSet
from distdiag.findings.source import location_of
from distdiag.views.alignment import Alignment
from distdiag.views.invariants import Aspect, contradiction

FIRST_PAUSE_S: Final = 0.0002
LONGEST_PAUSE_S: Final = 0.02


class Store(Protocol):
    """What is needed of a c10d store."""

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that has been set."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of the keys have been set."""

    def delete_key(self, key: str) -> bool:
        """Take a key out; say whether it was there."""


class _Announcement(msgspec.Struct, frozen=True, array_like=True):
    signature: Signature
    place: Frame | None
    module: str | None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Announcement).decode


class StrictGate:
    """Let a collective through when all ranks of its group are about to issue the same one."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        store: Callable[[], Store],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compare over the store that `store` returns, which must not be shared with others."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._store = store
        self._clock = clock
        self._given_up: set[tuple[str, int]] = set()

    def compare(
        self, group: ProcessGroup, seq_id: int, signature: Signature, site: CallSite
    ) -> None:
        """Wait until every rank has announced its call, and compare them.

        Raises:
            CollectiveMismatchError: the ranks are about to issue calls that contradict one another.

        """
        key = (group.name, group.generation)
        if len(group.ranks) < 2 or key in self._given_up:
            return
        store = self._store()
        prefix = f"{group.generation}/{group.name}/{seq_id}"
        mine = _Announcement(signature, site.location, site.module)
        store.set(f"{prefix}/{self._rank}", _encode(mine))
        keys = {rank: f"{prefix}/{rank}" for rank in group.ranks}
        if not self._wait(store, list(keys.values())):
            # A rank that is late is not a mismatch. Its absence is the monitor's business, and
            # waiting again at each later call would make a slow run unbearable.
            self._given_up.add(key)
            return
        announced = {rank: _decode(store.get(key)) for rank, key in keys.items()}
        # Everybody has announced this call, so everybody has read the announcements before it.
        store.delete_key(f"{group.generation}/{group.name}/{seq_id - 1}/{self._rank}")
        _raise_on_contradiction(group, seq_id, announced)

    def _wait(self, store: Store, keys: list[str]) -> bool:
        deadline = self._clock() + self._timeout_s
        pause_s = FIRST_PAUSE_S
        while not store.check(keys):
            if self._clock() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True


def _raise_on_contradiction(
    group: ProcessGroup, seq_id: int, announced: Mapping[int, _Announcement]
) -> None:
    by_rank = {
        rank: Collective(
            rank=rank,
            seq=0,
            time_ns=0,
            group=group,
            collective_seq_id=seq_id,
            signature=said.signature,
            site=CallSite((said.place,) if said.place else (), said.module),
        )
        for rank, said in announced.items()
    }
    aspect = contradiction(
        Alignment(
            kind="collective",
            key=(group.label, seq_id),
            by_rank=by_rank,
            expected_ranks=RankSet(group.ranks),
        )
    )
    if aspect is not None:
        raise CollectiveMismatchError(_message(group, seq_id, aspect, announced))


def _message(
    group: ProcessGroup, seq_id: int, aspect: Aspect, announced: Mapping[int, _Announcement]
) -> str:
    ranks_by_call: dict[str, list[int]] = {}
    for rank, said in announced.items():
        ranks_by_call.setdefault(_describe(said), []).append(rank)
    lines = [f"  {RankSet(ranks).phrase()}: {call}" for call, ranks in ranks_by_call.items()]
    return "\n".join(
        [
            f"collective #{seq_id} in group {group.label} was not issued: "
            f"its ranks disagree on {aspect.value.replace('_', ' ')}",
            *lines,
        ]
    )


def _describe(said: _Announcement) -> str:
    signature = said.signature
    parts = [
        f"{signature.op}(sizes {[list(size) for size in signature.input_sizes]}",
        f"dtypes {', '.join(signature.dtypes)}",
    ]
    if signature.reduce_op is not None:
        parts.append(f"op {signature.reduce_op}")
    if signature.root is not None:
        parts.append(f"root {signature.root}")
    place = f" at {location_of(said.place)}" if said.place else ""
    module = f" for {said.module}" if said.module else ""
    return ", ".join(parts) + f"){place}{module}"


# A connection to the job's store that only the strict mode uses.


def own_store() -> Callable[[], Store]:
    """Return what opens the connection at its first use, and again after a new initialisation.

    A connection of its own: on a shared one, somebody else's long wait would block ours.
    """
    opened: list[tuple[Any, Any]] = []

    def open_store() -> Store:
        base: Any = distributed_c10d._get_default_store()
        if not opened or opened[0][0] is not base:
            opened[:] = [(base, PrefixStore("distdiag/strict", base.clone()))]
        store: Store = opened[0][1]
        return store

    return open_store
