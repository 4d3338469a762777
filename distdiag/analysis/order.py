"""In which order ranks ended, as far as files tell it: for the checks, by comparable times."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from distdiag.dumps.reading import RankDump
from distdiag.events.base import Event
from distdiag.events.lifecycle import Exited, Raised
from distdiag.events.stacks import Observed

_MAIN: Final = "MainThread"
_STEP_NS: Final = 1_000_000
"""What follows another in a file comes later, by so much where no time is known."""
_UNKNOWN_NS: Final = 1_000_000_000
"""The clock of ends of which no time is known begins here."""


@dataclass
class _End:
    """What is known of when one rank ended."""

    rank: int
    is_first: bool = False
    time_ns: int = 0
    places: dict[str, int] = field(default_factory=dict)
    is_told: bool = False
    """Its exception is in a log: where that stands tells more than where a list names the rank."""

    def take(self, dump: RankDump, event: Raised | Exited) -> None:
        if event.time_ns:
            self.time_ns = min(self.time_ns or event.time_ns, event.time_ns)
        is_told = isinstance(event, Raised)
        if is_told and not self.is_told:
            self.places.clear()
        if is_told or not self.is_told:
            self.places[dump.path] = min(self.places.get(dump.path, dump.place), dump.place)
        self.is_told |= is_told


def in_order(dumps: Sequence[RankDump]) -> list[RankDump]:
    """Return the dumps with times of ends that can be compared with one another.

    What torchrun calls the first failure comes first. The others follow by their times if all have
    one, else by their places in a file. Ends of which nothing tells the order have one time.
    """
    ends = _ends(dumps)
    times = _by_clock(ends) or _by_place(ends)
    return [
        msgspec.structs.replace(dump, events=tuple(_timed(event, times) for event in dump.events))
        if dump.rank in times
        else dump
        for dump in dumps
    ]


def _ends(dumps: Iterable[RankDump]) -> list[_End]:
    ends: dict[int, _End] = {}
    firsts: set[int] = set()
    for dump in dumps:
        if dump.rank is None:
            continue
        for event in dump.events:
            if (isinstance(event, Raised) and event.thread == _MAIN) or isinstance(event, Exited):
                ends.setdefault(dump.rank, _End(dump.rank)).take(dump, event)
            elif isinstance(event, Observed) and _is_root_cause(event):
                firsts.add(dump.rank)
    for rank in firsts & ends.keys():
        # The launchers of several nodes each have a first failure; those of one name it once.
        ends[rank].is_first = len(firsts) == 1
    return list(ends.values())


def _is_root_cause(seen: Observed) -> bool:
    """Say whether torchrun names the rank as the first failure; of some nodes all were told to."""
    return bool(seen.values.get("is_first_failure")) and seen.values["exitcode"] != -signal.SIGTERM


def _by_clock(ends: Sequence[_End]) -> dict[int, int]:
    if not all(end.time_ns for end in ends):
        return {}
    earliest = min((end.time_ns for end in ends), default=0)
    # Clocks of launchers have seconds only.
    return {end.rank: earliest - 1 if end.is_first else end.time_ns for end in ends}


def _by_place(ends: Sequence[_End]) -> dict[int, int]:
    """Return times by the places in the file that tells of the most ends.

    Ends that other files tell come later; if each is in a file of its own, all have one time.
    """
    counts = Counter(path for end in ends for path in end.places)
    path, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    places = sorted(end.places[path] for end in ends if count > 1 and path in end.places)
    order = {place: number for number, place in enumerate(places, 1)}
    return {
        end.rank: _UNKNOWN_NS
        + (0 if end.is_first else order.get(end.places.get(path, -1), len(order) + 1) * _STEP_NS)
        for end in ends
    }


def _timed(event: Event, times: dict[int, int]) -> Event:
    if isinstance(event, Raised | Exited):
        return msgspec.structs.replace(event, time_ns=times[event.rank])
    return event
