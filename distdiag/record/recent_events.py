"""The newest events of a rank, within a bound: enough to draw them, however long the run was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from distdiag.events.base import Event
from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import RankStarted
from distdiag.record.event_file import HEADER, LENGTH, MAGIC, MARKED, START
from distdiag.record.regular_file import read_regular
from distdiag.record.wire import MAX_RECORD, STATES, EventDecoder, Interner

MOST_SEGMENTS: Final = 8
"""So many segments of a rank, the newest, are looked at: 8 MiB, some 100,000 calls."""
FIRST_RECORDS: Final = 64
"""The record that a rank has begun is among so many: probes may define things before it."""
_DEFINITIONS: Final = frozenset(b"GSFLZ")
"""The tags of the records that give a number to what later records refer to."""

_Record = tuple[bytes, int, bool]
"""A payload, its mark (0 if it has none), and whether it only defines a number."""


@dataclass(frozen=True, slots=True)
class RecentEvents:
    """The newest events of one rank, in their order.

    `started` is its first record, also where later ones are left out. `num_left_out` counts the
    events before the first that is here, as far as they were looked at; `problem` says what could
    not be read. How far a call went is a `CollectiveState` with the time of the call.
    """

    events: tuple[Event, ...] = ()
    started: RankStarted | None = None
    num_left_out: int = 0
    problem: str = ""


def recorded_ranks(folder: Path) -> list[int]:
    """Return the ranks that have event files in the folder of an attempt."""
    names = (path.name for path in folder.glob("rank-*.*.events"))
    numbers = {name.removeprefix("rank-").partition(".")[0] for name in names}
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_recent(folder: Path, rank: int, interner: Interner, most: int) -> RecentEvents:
    """Read the last events of a rank, at most so many; damage ends it and is told."""
    decoder = EventDecoder(rank, interner)
    segments = sorted(folder.glob(f"rank-{rank}.*.events"))
    problem = ""
    kept: list[list[_Record]] = []
    num_events = 0
    for path in reversed(segments[-MOST_SEGMENTS:]):
        records, damage = _records(path)
        problem = problem or damage
        kept.append(records)
        num_events += sum(not is_definition for _, _, is_definition in records)
        if num_events >= most:
            break
    events: list[Event] = []
    left_out = num_to_skip = max(0, num_events - most)
    try:
        for payload, mark, is_definition in chain.from_iterable(reversed(kept)):
            if num_to_skip and not is_definition:
                num_to_skip -= 1
                continue
            event = decoder.decode(payload)
            if event is not None and event.rank == rank:
                events.append(event)
                events.extend(_states(event, mark))
    except DamagedFileError as error:
        problem = problem or str(error)
    return RecentEvents(tuple(events), _started(segments, rank), left_out, problem)


def _started(segments: list[Path], rank: int) -> RankStarted | None:
    """Return the first record of a rank, which stands at the beginning of the first segment."""
    if not segments:
        return None
    decoder = EventDecoder(rank, Interner())
    try:
        for payload, _, _ in _records(segments[0], most=FIRST_RECORDS)[0]:
            event = decoder.decode(payload)
            if isinstance(event, RankStarted):
                return event
    except DamagedFileError:
        return None
    return None


def _records(path: Path, most: int = 1 << 30) -> tuple[list[_Record], str]:
    """Return the records of a segment, and what is wrong with it."""
    try:
        data = read_regular(path)
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}"
    if len(data) < HEADER.size or data[: HEADER.size] == bytes(HEADER.size):
        return [], ""  # created a moment before its writer ended
    if not data.startswith(MAGIC):
        return [], f"{path} is not an event file of this version of distdiag"
    found: list[_Record] = []
    offset = START
    while offset + LENGTH.size <= len(data) and len(found) < most:
        (length,) = LENGTH.unpack_from(data, offset)
        if length == 0:
            break
        size, is_marked = length & ~MARKED, length >= MARKED
        begin = offset + LENGTH.size
        end = begin + size
        if size > MAX_RECORD or end + is_marked > len(data):
            return found, f"{path}: record at byte {offset} claims {size} bytes"
        payload = data[begin:end]
        found.append((payload, data[end] if is_marked else 0, _is_definition(payload)))
        offset = end + is_marked
    return found, ""


def _is_definition(payload: bytes) -> bool:
    """Say whether a record only gives a number to something: an array with a tag of one letter."""
    if len(payload) < 3 or payload[0] & 0xF0 != 0x90:
        return False
    return payload[1] == 0xA1 and payload[2] in _DEFINITIONS


def _states(event: Event, mark: int) -> Iterator[CollectiveState]:
    if isinstance(event, Collective):
        for state in STATES[: min(mark, 2)]:
            yield CollectiveState(
                rank=event.rank,
                seq=event.seq,
                time_ns=event.time_ns,
                step=event.step,
                call=event.seq,
                state=state,  # type: ignore[arg-type]
            )
