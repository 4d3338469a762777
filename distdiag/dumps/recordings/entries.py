"""Examine the entries of a flight recorder and number what repeats in them.

Entries that follow one another in a loop look alike, so each is first compared with the one that
came next last time; only a new one is examined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec

from distdiag.dumps.foreign_code import is_foreign_user_file
from distdiag.dumps.recordings.names import (
    COALESCED,
    backend_and_op,
    batch_op,
    peers_of,
    signature_of,
)
from distdiag.dumps.recordings.recording import RecordedCall, RecordedGroup, Tables
from distdiag.event import Frame, Signature

MOST_TENSORS: Final = 65_536
MOST_DIMS: Final = 64
MOST_FRAMES: Final = 300
MOST_NUMBERS: Final = 20_000_000
"""So many sizes and frames may all the distinct calls of a dump have together."""

_Dims = Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_DIMS)]
_Sizes = Annotated[tuple[_Dims, ...], msgspec.Meta(max_length=MOST_TENSORS)]
_Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_TENSORS)]

_SHAPE: Final = itemgetter(
    "profiling_name",
    "process_group",
    "pg_id",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
)


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """The part of an entry that repeats: the fields of `_SHAPE`."""

    profiling_name: str
    process_group: tuple[str, str]
    pg_id: int
    input_sizes: _Sizes
    output_sizes: _Sizes
    input_dtypes: _Names
    output_dtypes: _Names


class _RawFrame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class KnownEntry:
    """An entry that was examined: its places in the tables, and what it looked like."""

    group: int
    call: int
    is_message: bool
    ends_batch: bool
    shape: tuple[Any, ...]
    frames: Any


class EntryTables:
    """The groups, frames and calls of one dump, numbered as they came."""

    def __init__(self, group_ranks: Mapping[str, str]) -> None:
        """Start empty; `group_ranks` is the text of the ranks of each group by its name."""
        self._group_ranks = group_ranks
        self._groups: dict[tuple[RecordedGroup, int], int] = {}
        self._frames: list[Frame] = []
        self._frame_of_object: dict[int, int] = {}
        self._calls: list[RecordedCall] = []
        self._places: dict[Frame | RecordedCall, int] = {}
        self._known: dict[tuple[int, int], KnownEntry] = {}
        self._next: dict[KnownEntry | None, KnownEntry] = {}
        self._last: KnownEntry | None = None
        self._num_numbers = 0

    @property
    def groups(self) -> tuple[tuple[RecordedGroup, int], ...]:
        """Each group with the number of its instance: a name is used again after its end."""
        return tuple(self._groups)

    def tables(self) -> Tables:
        """Return the frames and calls by their places."""
        return Tables(tuple(self._frames), tuple(self._calls))

    def look_up(self, entry: Mapping[str, Any]) -> KnownEntry:
        """Return what is known of an entry that looks like this one.

        Raises:
            KeyError: a field is missing.
            TypeError: the entry is not made of fields.
            msgspec.ValidationError: a field holds something else than it should.

        """
        shape = _SHAPE(entry)
        frames = entry.get("frames")
        known = self._next.get(self._last)
        if known is None or known.shape != shape or known.frames != frames:
            known = self._examine(shape, frames)
            self._next[self._last] = known
        self._last = known
        return known

    def batch(self, members: tuple[int, ...]) -> int:
        """Return the place of the call that several calls make up which were issued as one."""
        parts = [self._calls[place] for place in members]
        parts = [part for part in parts if part.signature.op != COALESCED] or parts[:1]
        self._count(sum(_num_numbers(part.signature) for part in parts))
        signature = Signature(
            batch_op({part.signature.op for part in parts}),
            tuple(size for part in parts for size in part.signature.input_sizes),
            tuple(size for part in parts for size in part.signature.output_sizes),
            tuple(dict.fromkeys(name for part in parts for name in part.signature.dtypes)),
        )
        return self._place_of(RecordedCall(signature, parts[0].frames, parts[0].api))

    def _examine(self, raw: tuple[Any, ...], raw_frames: Any) -> KnownEntry:  # noqa: ANN401
        shape = msgspec.convert(raw, _Shape)
        frames = self._places_of(raw_frames)
        backend, op = backend_and_op(shape.profiling_name)
        name, desc = shape.process_group
        group = (RecordedGroup(name, desc, backend, self._group_ranks.get(name, "")), shape.pg_id)
        api = self._api(frames)
        signature = signature_of(
            op, shape.input_sizes, shape.output_sizes, shape.input_dtypes or shape.output_dtypes
        )
        self._count(_num_numbers(signature) + len(frames))
        known = KnownEntry(
            group=self._groups.setdefault(group, len(self._groups)),
            call=self._place_of(RecordedCall(signature, frames, api)),
            is_message=peers_of(op) is not None,
            ends_batch=op.endswith(COALESCED),
            shape=raw,
            frames=raw_frames,
        )
        return self._known.setdefault((known.group, known.call), known)

    def _place_of(self, call: RecordedCall) -> int:
        place = self._places.setdefault(call, len(self._calls))
        if place == len(self._calls):
            self._calls.append(call)
        return place

    def _places_of(self, frames: Any) -> tuple[int, ...]:  # noqa: ANN401
        if frames is None:
            return ()
        if not isinstance(frames, list):
            raise TypeError("its frames are no list")
        return tuple(self._place_of_frame(frame) for frame in frames[:MOST_FRAMES])

    def _place_of_frame(self, raw: object) -> int:
        # The recorder writes a frame once and refers to it; the dump keeps the object alive.
        place = self._frame_of_object.get(id(raw))
        if place is None:
            frame = msgspec.convert(raw, _RawFrame)
            user = is_foreign_user_file(frame.filename)
            value = Frame(frame.filename, frame.line, frame.name.rpartition(".")[2], user)
            place = self._places.setdefault(value, len(self._frames))
            if place == len(self._frames):
                self._frames.append(value)
            self._frame_of_object[id(raw)] = place
        return place

    def _api(self, frames: tuple[int, ...]) -> str | None:
        if not frames:
            return None
        innermost = self._frames[frames[0]]
        is_front = innermost.file.endswith("torch/distributed/distributed_c10d.py")
        return innermost.function if is_front else None

    def _count(self, num_numbers: int) -> None:
        """Parts of a hostile dump may be shared, so that it grows while it is examined."""
        self._num_numbers += num_numbers
        if self._num_numbers > MOST_NUMBERS:
            raise TypeError("its calls have implausibly many sizes")


def _num_numbers(signature: Signature) -> int:
    return sum(map(len, signature.input_sizes)) + sum(map(len, signature.output_sizes)) + 1
