"""Build a recording from the entries of a flight recorder, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from distdiag.dumps.recordings.entries import EntryTables, KnownEntry
from distdiag.dumps.recordings.names import COALESCED, is_symmetric
from distdiag.dumps.recordings.recording import (
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
            windows=tuple(_windows(rows, groups, tables)),
            first_id=ids[0] if ids else 0,
            has_stacks=bool(tables.frames) or not rows,
            newest_ns=max(self._newest_ns, 0),
            timed_out_s=self._timed_out_ms / 1000,
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
    rows: Sequence[Row], groups: Sequence[RecordedGroup], tables: Tables
) -> Iterator[GroupWindow]:
    """Yield the window of each group."""
    held: list[dict[int, tuple[int, int]]] = [{} for _ in groups]
    for group, call, seq_id, state, _ in rows:
        if seq_id != NO_SEQ:
            held[group][seq_id] = (call, state)
    digests = tables.digests()
    for recorded, by_seq in zip(groups, held, strict=True):
        last = max(by_seq, default=-1)
        first = last
        while first - 1 in by_seq:
            first -= 1
        whole = range(first, last + 1) if by_seq else ()
        yield GroupWindow(
            max(first, 0),
            b"".join([digests[by_seq[seq_id][0]] for seq_id in whole]),
            _proven(by_seq, last, tables, is_nccl=recorded.backend != "gloo"),
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
