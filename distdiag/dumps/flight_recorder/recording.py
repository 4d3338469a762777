"""The recorded calls of one rank in a compact form, which worker processes hand over."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from distdiag.dumps.flight_recorder.names import comparable
from distdiag.dumps.reading import RankDump
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Signature

PENDING: Final = 0
COMPLETED: Final = 1
RETIRED: Final = 2
"""The backend let go of the call: gloo when it ended in any way, NCCL also when it timed out."""

NO_SEQ: Final = -1
"""The number of a point-to-point call, which is none of the group's collectives."""
DIGEST_BYTES: Final = 8

Row = tuple[int, int, int, int, int]
"""Group, call, number in the group, state and time of one call; see `Columns`."""


class RecordedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A process group as a dump names it. `ranks` is the text of their list, or ``""``."""

    name: str
    desc: str
    backend: str
    ranks: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it the same group on all ranks."""
        return (self.name, self.desc, self.backend)


class RecordedCall(msgspec.Struct, frozen=True, array_like=True):
    """What a call asks for and where it was made; `frames` are places in the table of frames."""

    signature: Signature
    frames: tuple[int, ...]
    api: str | None = None


class Tables(msgspec.Struct, frozen=True, array_like=True):
    """The values that repeat in a recording."""

    frames: tuple[Frame, ...]
    calls: tuple[RecordedCall, ...]

    def site(self, call: RecordedCall) -> CallSite:
        """Return where a call was made."""
        return CallSite(tuple(self.frames[place] for place in call.frames))

    def digests(self) -> list[bytes]:
        """Return for each call a digest that is equal where the ranks agree on it."""
        return [self._digest(call) for call in self.calls]

    def _digest(self, call: RecordedCall) -> bytes:
        place = tuple(self.frames[n] for n in call.frames if self.frames[n].user)
        data = msgspec.msgpack.encode((comparable(call.signature), call.api, place))
        return blake2b(data, digest_size=DIGEST_BYTES).digest()


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The calls in the order in which they were made, each an entry of every column.

    `groups` and `calls` are places in `Recording.groups` and `Tables.calls`; `seq_ids` are
    `NO_SEQ` for point-to-point calls; `times_ns` the wall clock when they were issued.
    """

    groups: bytes
    calls: bytes
    seq_ids: bytes
    states: bytes
    times_ns: bytes

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """Pack rows.

        Raises:
            OverflowError: a number does not fit its column.
            TypeError: a value is no integer.

        """
        groups, calls, seq_ids, states, times = zip(*rows, strict=True) if rows else ((),) * 5
        return cls(
            array("I", groups).tobytes(),
            array("I", calls).tobytes(),
            array("q", seq_ids).tobytes(),
            bytes(states),
            array("q", times).tobytes(),
        )

    def rows(self) -> Iterator[Row]:
        """Yield the rows again."""
        return zip(
            array("I", self.groups),
            array("I", self.calls),
            array("q", self.seq_ids),
            self.states,
            array("q", self.times_ns),
            strict=True,
        )


class GroupWindow(msgspec.Struct, frozen=True, array_like=True):
    """The collectives of one group that a recording holds, from number `first` on without a gap.

    `digests` has `DIGEST_BYTES` for each. All ranks must have come to the collectives up to
    number `proven`, since this rank saw them end (-1: nothing is known of that). The first that has
    not ended on this rank is `unended` (-1: there is none); the last that its GPU has begun is
    `started` (-1: there is none).
    """

    first: int
    digests: bytes
    proven: int = -1
    unended: int = -1
    started: int = -1

    @property
    def last(self) -> int:
        """The number of the last collective, below `first` if there is none."""
        return self.first + len(self.digests) // DIGEST_BYTES - 1

    def digests_of(self, first: int, last: int) -> bytes:
        """Return the digests of the collectives from `first` to `last`."""
        begin = (first - self.first) * DIGEST_BYTES
        return self.digests[begin : begin + (last + 1 - first) * DIGEST_BYTES]


class Recording(msgspec.Struct, frozen=True, array_like=True):
    """What a flight recorder holds of one rank.

    `tables` is the MessagePack of `Tables`: the same bytes for ranks that did the same. `windows`
    has one entry for each group. `first_id` counts the calls before the first one that is held.
    `newest_ns` is the wall clock of the last call, `timed_out_s` the timeout that a call had
    reached, or 0. `knows_starts`: it tells calls that the GPU has begun from those that it has not;
    torch does so where it times them.
    """

    version: str
    groups: tuple[RecordedGroup, ...]
    tables: bytes
    columns: Columns
    windows: tuple[GroupWindow, ...]
    first_id: int = 0
    has_stacks: bool = False
    newest_ns: int = 0
    timed_out_s: float = 0.0
    knows_starts: bool = False


class RecordingDump(RankDump, frozen=True, kw_only=True):
    """What one flight-recorder dump says of its rank."""

    recording: Recording
