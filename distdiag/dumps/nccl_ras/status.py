"""What NCCL's RAS subsystem knows of a job, whichever form it was told in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Member(msgspec.Struct, frozen=True):
    """A rank of a communicator (not a global rank) and its process; `note` says what it is in."""

    rank: int
    pid: int | None = None
    host: str = ""
    note: str = ""


class Lag(msgspec.Struct, frozen=True):
    """Some ranks have launched fewer operations of a kind than others: `launched` of `most`.

    `members` are those that NCCL names: its text leaves out large groups, `num_members` does not.
    """

    op: str
    launched: int
    most: int
    num_members: int
    members: tuple[Member, ...]


class Communicator(msgspec.Struct, frozen=True):
    """A communicator that NCCL has something to tell of.

    `missing` did not answer or are no longer members. `odd` are in another state than running: the
    note says which.
    """

    name: str
    size: int | None = None
    lags: tuple[Lag, ...] = ()
    missing: tuple[Member, ...] = ()
    num_missing: int = 0
    odd: tuple[Member, ...] = ()

    @property
    def is_sick(self) -> bool:
        """Whether its ranks differ, or some are missing or not running."""
        return bool(self.lags or self.missing or self.num_missing or self.odd)


class RasStatus(msgspec.Struct, frozen=True):
    """One answer. `pids` are all processes of the job; the text form does not list them."""

    nccl_version: str
    num_communicators: int
    communicators: tuple[Communicator, ...]
    dead: tuple[Member, ...] = ()
    num_timeouts: int = 0
    pids: frozenset[int] = frozenset()


def lags_of(op: str, groups: Iterable[tuple[int, int, tuple[Member, ...]]]) -> list[Lag]:
    """Compare groups of ranks, each given by its count of operations, its size and its members."""
    groups = list(groups)
    most = max((count for count, _, _ in groups), default=0)
    return [Lag(op, count, most, size, members) for count, size, members in groups if count < most]


def describe(communicator: Communicator, rank_of: Callable[[Member], int | None]) -> list[str]:
    """Return what is odd of a communicator, one sentence each.

    `rank_of` returns the global rank of a member, or None where it is not known.
    """

    def who(members: tuple[Member, ...], number: int) -> str:
        named = [_who(member, rank_of(member)) for member in members[:8]]
        return ", ".join(named) if named else f"{number} ranks that NCCL does not name"

    place = f"communicator {communicator.name}"
    place += f" of {communicator.size} ranks" if communicator.size else ""
    said = [
        f"in {place}, {who(lag.members, lag.num_members)}: {lag.launched} {lag.op} operations "
        f"launched, others {lag.most}"
        for lag in communicator.lags
    ]
    if communicator.missing or communicator.num_missing:
        missing = who(communicator.missing, communicator.num_missing)
        said.append(f"in {place}, NCCL has no data of {missing}")
    if communicator.odd:
        said.append(f"in {place}, {who(communicator.odd, len(communicator.odd))}")
    return said


def _who(member: Member, rank: int | None) -> str:
    if rank is not None:
        name = f"rank {rank}"
    elif member.pid is not None:
        name = f"member {member.rank} (process {member.pid} on {member.host})"
    else:
        name = f"member {member.rank}"
    return f"{name}, {member.note}" if member.note else name
