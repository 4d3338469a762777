"""One lane of time for each rank: its steps, calls, waits, phases, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from distdiag.events.base import Event
from distdiag.events.collectives import Collective
from distdiag.events.lifecycle import Exited, Finished, Heartbeat, Raised, RankStarted, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.reports.formats.html.calls import Call, Calls, place
from distdiag.reports.recording import Recording

MOST_BARS: Final = 60_000
"""So many bars of all ranks are in the page: some 20 bytes each, 1.2 MB."""
MOST_OF_A_LANE: Final = 1500
FEWEST_OF_A_LANE: Final = 60

KINDS: Final = ("step", "call", "wait", "phase", "moment")
"""The kinds of bars, by their number in the page."""
STEP, CALL, WAIT, PHASE, MOMENT = range(len(KINDS))


class Bar(msgspec.Struct, array_like=True):
    """A stretch of time of one rank, in microseconds since the page's beginning.

    `first` and `last` are numbers of steps, or of calls in their group, -1 for none; `text` is the
    place of a word in the lanes' list of texts; `merged` bars are shown as one.
    """

    kind: int
    start: int
    length: int
    first: int
    last: int
    text: int
    merged: int = 1


class Lane(msgspec.Struct):
    """The bars of one rank; `left_out` events of it were before the first bar."""

    rank: int
    bars: list[Bar]
    left_out: int = 0


class Lanes(msgspec.Struct):
    """All lanes. `length` is the time that they cover, in microseconds."""

    length: int
    texts: list[str]
    lanes: list[Lane]


def lanes_of(recording: Recording, calls: Calls, first: RankSet) -> Lanes | None:
    """Return a lane of each rank that recorded anything, None where none did.

    The ranks `first` come first: those whom findings name would be far down among hundreds.
    """
    offsets = recording.offsets_ns()
    drawers = {
        rank: _Drawer(rank, offsets.get(rank, 0), recent.num_left_out)
        for rank, recent in sorted(
            recording.by_rank.items(), key=lambda item: (item[0] not in first, item[0])
        )
        if recent.events
    }
    if not drawers:
        return None
    texts: dict[str, int] = {"": 0}
    for rank, drawer in drawers.items():
        drawer.draw_events(recording.by_rank[rank].events, texts)
        drawer.draw_beats((e for e in recording.noted if e.rank == rank), texts)
    end_ns = max(drawer.end_ns for drawer in drawers.values())
    for rank, drawer in drawers.items():
        drawer.draw_calls(calls, calls.by_rank[rank], end_ns, texts)
    start_ns = min(drawer.start_ns for drawer in drawers.values())
    most = min(MOST_OF_A_LANE, max(FEWEST_OF_A_LANE, MOST_BARS // len(drawers)))
    length = max(1, (end_ns - start_ns) // 1000)
    return Lanes(
        length,
        list(texts),
        [drawer.lane(start_ns, length, most) for drawer in drawers.values()],
    )


class _Drawer:
    """Draws one lane in nanoseconds of the wall clock."""

    def __init__(self, rank: int, offset_ns: int, left_out: int) -> None:
        self.start_ns = 1 << 63
        self.end_ns = 0
        self._rank = rank
        self._offset_ns = offset_ns
        self._left_out = left_out
        self._bars: list[Bar] = []

    def draw_events(self, events: Iterable[Event], texts: dict[str, int]) -> None:
        for event in events:
            match event:
                case StepEnd():
                    length_ns = max(0, int(event.duration_s * 1e9))
                    self._add(STEP, event.time_ns - length_ns, length_ns, event.step, 0)
                case Raised():
                    self._moment(event, f"raised {event.type}", texts)
                case Finished():
                    self._moment(event, f"finished with status {event.exit_status}", texts)
                case RankStarted():
                    self._moment(event, "started", texts)
                case _:
                    self._cover(event.time_ns, event.time_ns)

    def draw_beats(self, noted: Iterator[Event], texts: dict[str, int]) -> None:
        """Draw phases between heartbeats, and what the monitor noted."""
        before: Heartbeat | None = None
        for event in noted:
            match event:
                case Heartbeat():
                    if before is not None and before.phase == event.phase:
                        length = event.time_ns - before.time_ns
                        text = _number(texts, str(event.phase))
                        self._add(PHASE, before.time_ns, length, event.step, text)
                    before = event
                case Stacks(is_native=False, error=""):
                    self._moment(event, "its stacks were taken", texts)
                case Exited():
                    self._moment(event, "its process was gone", texts)

    def draw_calls(
        self, calls: Calls, own: Iterable[Call], end_ns: int, texts: dict[str, int]
    ) -> None:
        """Draw where calls began, and how long the host waited where that is known."""
        held = calls.held.get(self._rank)
        for call in own:
            event = call.event
            text = _number(texts, _label(event))
            number = event.collective_seq_id
            if call is held:
                length = max(0, end_ns - self._offset_ns - event.time_ns)
                self._add(WAIT, event.time_ns, length, number, text)
            elif call.until_ns and event.is_async:
                self._add(CALL, event.time_ns, call.until_ns - event.time_ns, number, text)
            else:
                self._add(CALL, event.time_ns, 0, number, text)

    def lane(self, start_ns: int, length: int, most: int) -> Lane:
        """Return the lane with times from the beginning of the page, merged to so many bars."""
        for bar in self._bars:
            bar.start = max(0, bar.start - start_ns // 1000)
        return Lane(self._rank, _merged(self._bars, length, most), self._left_out)

    def _moment(self, event: Event, what: str, texts: dict[str, int]) -> None:
        self._add(MOMENT, event.time_ns, 0, event.step, _number(texts, what))

    def _add(self, kind: int, time_ns: int, length_ns: int, number: int, text: int) -> None:
        self._cover(time_ns, time_ns + length_ns)
        start = (time_ns + self._offset_ns) // 1000
        self._bars.append(Bar(kind, start, length_ns // 1000, number, number, text))

    def _cover(self, start_ns: int, end_ns: int) -> None:
        self.start_ns = min(self.start_ns, start_ns + self._offset_ns)
        self.end_ns = max(self.end_ns, end_ns + self._offset_ns)


def _label(call: Collective) -> str:
    where = place(call)
    return f"{call.signature.op} of {call.group.label}{f' at {where}' if where else ''}"


def _number(texts: dict[str, int], text: str) -> int:
    return texts.setdefault(text, len(texts))


def _merged(bars: list[Bar], length: int, most: int) -> list[Bar]:
    """Return at most so many bars: short ones that begin close together become one.

    Moments and waits stay as they are: there are few of them, and they are what one looks for.
    """
    bars.sort(key=lambda bar: (bar.start, bar.kind))
    slot = max(1, length // most)
    while True:
        kept = list(_in_slots(bars, slot))
        if len(kept) <= most or slot > length:
            return kept
        slot *= 2


def _in_slots(bars: Iterable[Bar], slot: int) -> Iterator[Bar]:
    open_bars: dict[int, Bar] = {}
    for bar in bars:
        if bar.kind in (MOMENT, WAIT):
            yield bar
            continue
        known = open_bars.get(bar.kind)
        if known is not None and bar.start // slot == known.start // slot:
            known.length = max(known.length, bar.start + bar.length - known.start)
            known.first = min(known.first, bar.first)
            known.last = max(known.last, bar.last)
            known.text = known.text if known.text == bar.text else 0
            known.merged += bar.merged
            continue
        if known is not None:
            yield known
        open_bars[bar.kind] = msgspec.structs.replace(bar)
    yield from open_bars.values()
