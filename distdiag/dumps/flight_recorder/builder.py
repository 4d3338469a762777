"""Build a recording from the entries of a flight recorder, one after the other."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec

from distdiag.dumps.flight_recorder.names import (
    COALESCED,
    backend_and_op,
    batch_op,
    is_symmetric,
    peers_of,
    signature_of,
)
from distdiag.dumps.flight_recorder.recording import (
    COMPLETED,
    NO_SEQ,
    PENDING,
    RETIRED,
    Columns,
    GroupWindow,
    RecordedCall,
    RecordedGroup,
    Recording,
    Row,
    Tables,
)
from distdiag.dumps.reading import is_foreign_user_file
from distdiag.events.base import Frame
from distdiag.events.collectives import Signature

# Examine the entries of a flight recorder and number what repeats in them.
#
# Entries that follow one another in a loop look alike, so each is first compared with the one that
# came next last time; only a new one is examined.

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

    def _examine(self, raw: tuple[Any, ...], raw_frames: object) -> KnownEntry:
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

    def _places_of(self, frames: object) -> tuple[int, ...]:
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


# Builds a recording, entry by entry.

# Not every version and backend has these.
_DEFAULTS: Final[dict[str, Any]] = {
    "pg_id": 0,
    "p2p_seq_id": 0,
    "input_dtypes": [],
    "output_dtypes": [],
    "time_created_ns": 0,
    "retired": False,
}
_ROW: Final = itemgetter(
    "record_id", "collective_seq_id", "p2p_seq_id", "time_created_ns", "state", "retired"
)
_STATES: Final = frozenset({"scheduled", "started", "completed"})


class RecordingBuilder:
    """Feed it all entries, oldest first, then let it `build`."""

    def __init__(self, group_ranks: Mapping[str, str]) -> None:
        """Start empty; `group_ranks` is the text of the ranks of each group by its name."""
        self._tables = EntryTables(group_ranks)
        self._rows: list[Row] = []
        self._ids: list[int] = []
        self._newest_row: dict[int, int] = {}
        self._batches: dict[int, list[int]] = {}
        self._messages: dict[int, tuple[int, list[int]]] = {}
        self._newest_ns = 0
        self._timed_out_ms = 0
        self._started: dict[int, int] = {}
        self._knows_starts = False

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take in one entry.

        Raises:
            AttributeError: the entry is not made of fields.
            KeyError: it has not the fields of an entry.
            TypeError: a field holds something else than it should; so does msgspec.MsgspecError.

        """
        try:
            known = self._tables.look_up(entry)
            record_id, seq_id, p2p_seq_id, time_ns, state, retired = _ROW(entry)
        except KeyError:
            entry = {**_DEFAULTS, **entry}
            known = self._tables.look_up(entry)
            record_id, seq_id, p2p_seq_id, time_ns, state, retired = _ROW(entry)
        if state not in _STATES:
            raise TypeError("its state is none of scheduled, started and completed")
        code = COMPLETED if state == "completed" else RETIRED if retired else PENDING
        self._knows_starts |= state == "started"
        if state != "scheduled" and not known.is_message:
            self._started[known.group] = max(self._started.get(known.group, -1), seq_id)
        self._ids.append(record_id)
        if code == RETIRED and known.shape[0].startswith("nccl"):
            self._timed_out_ms = max(self._timed_out_ms, int(entry.get("timeout_ms", 0)))
        if known.is_message:
            self._add_message(known, p2p_seq_id, code, time_ns)
        elif not (known.ends_batch and self._ends_messages(known.group, p2p_seq_id, code)):
            self._add_collective(known, seq_id, code, time_ns)

    def build(self, version: str) -> Recording:
        """Return what was added.

        Raises:
            OverflowError: a number is too large; TypeError: it is none.

        """
        for row, members in self._batches.items():
            group, _, seq_id, code, time_ns = self._rows[row]
            call = self._tables.batch(tuple(members))
            self._rows[row] = (group, call, seq_id, code, time_ns)
        ids = array("q", self._ids)
        tables = self._tables.tables()
        rows = self._whole_rows(tables, is_cut=bool(ids) and ids[0] > 0)
        groups = tuple(group for group, _ in self._tables.groups)
        return Recording(
            version=version,
            groups=groups,
            tables=msgspec.msgpack.encode(tables),
            columns=Columns.of(rows),
            windows=tuple(_windows(rows, groups, tables, self._started)),
            first_id=ids[0] if ids else 0,
            has_stacks=bool(tables.frames) or not rows,
            newest_ns=max(self._newest_ns, 0),
            timed_out_s=self._timed_out_ms / 1000,
            knows_starts=self._knows_starts,
        )

    def _add_collective(self, known: KnownEntry, seq_id: int, code: int, time_ns: int) -> None:
        group = known.group
        newest = self._newest_row.get(group, -1)
        if newest >= 0 and self._rows[newest][2] == seq_id:
            members = self._batches.setdefault(newest, [self._rows[newest][1]])
            members.append(known.call)
            # The entry that ends a batch is the only one that learns of its completion.
            self._rows[newest] = (group, members[0], seq_id, code, self._rows[newest][4])
            return
        self._newest_row[group] = len(self._rows)
        self._rows.append((group, known.call, seq_id, code, time_ns))
        self._newest_ns = max(self._newest_ns, time_ns)

    def _add_message(self, known: KnownEntry, p2p_seq_id: int, code: int, time_ns: int) -> None:
        batch_id, rows = self._messages.get(known.group, (-1, []))
        if batch_id != p2p_seq_id:
            rows = []
            self._messages[known.group] = (p2p_seq_id, rows)
        rows.append(len(self._rows))
        self._rows.append((known.group, known.call, NO_SEQ, code, time_ns))
        self._newest_ns = max(self._newest_ns, time_ns)

    def _ends_messages(self, group: int, p2p_seq_id: int, code: int) -> bool:
        """Let the entry that ends a batch of messages tell their state, if it is one."""
        batch_id, rows = self._messages.pop(group, (-1, []))
        if batch_id != p2p_seq_id or not rows or rows[-1] < self._newest_row.get(group, -1):
            return False
        for row in rows:
            number, call, seq_id, _, time_ns = self._rows[row]
            self._rows[row] = (number, call, seq_id, code, time_ns)
        return True

    def _whole_rows(self, tables: Tables, *, is_cut: bool) -> list[Row]:
        """Leave out instances of groups that came to an end, and a batch whose begin is lost."""
        newest = {group.key: place for place, (group, _) in enumerate(self._tables.groups)}
        kept = set(newest.values())
        rows = self._rows
        if is_cut and rows and (0 in self._batches or _is_batch(tables.calls[rows[0][1]])):
            rows = rows[1:]
        return [row for row in rows if row[0] in kept]


def _is_batch(call: RecordedCall) -> bool:
    return call.signature.op.endswith(COALESCED)


def _windows(
    rows: Sequence[Row],
    groups: Sequence[RecordedGroup],
    tables: Tables,
    started: Mapping[int, int],
) -> Iterator[GroupWindow]:
    """Yield the window of each group."""
    held: list[dict[int, tuple[int, int]]] = [{} for _ in groups]
    for group, call, seq_id, state, _ in rows:
        if seq_id != NO_SEQ:
            held[group][seq_id] = (call, state)
    digests = tables.digests()
    for place, (recorded, by_seq) in enumerate(zip(groups, held, strict=True)):
        last = max(by_seq, default=-1)
        first = last
        while first - 1 in by_seq:
            first -= 1
        whole = range(first, last + 1) if by_seq else ()
        is_nccl = recorded.backend != "gloo"
        in_call = {PENDING, RETIRED} if is_nccl else {PENDING}
        unended = [seq_id for seq_id, (_, state) in by_seq.items() if state in in_call]
        yield GroupWindow(
            max(first, 0),
            b"".join([digests[by_seq[seq_id][0]] for seq_id in whole]),
            _proven(by_seq, last, tables, is_nccl=is_nccl),
            min(unended, default=-1),
            started.get(place, -1),
        )


def _proven(
    by_seq: Mapping[int, tuple[int, int]], last: int, tables: Tables, *, is_nccl: bool
) -> int:
    """Return the last collective that cannot have ended without every rank.

    Gloo lets go of a call also when it failed; but then the rank makes no further one.
    """
    for seq_id in sorted(by_seq, reverse=True):
        call, state = by_seq[seq_id]
        has_ended = state == COMPLETED or (state == RETIRED and not is_nccl and seq_id < last)
        if has_ended and is_symmetric(tables.calls[call].signature.op):
            return seq_id
    return -1
