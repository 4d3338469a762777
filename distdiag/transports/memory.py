"""Events from a list: for tests and for programs that make their events themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from distdiag.events.base import Event
from distdiag.transports.base import EventSource


class MemorySource(EventSource):
    """Yield the events that were given or added, each once."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Begin with these events."""
        self._events = deque(events)

    def add(self, *events: Event) -> None:
        """Append events for the next call of `poll`."""
        self._events.extend(events)

    def poll(self) -> Iterator[Event]:
        """Yield all events that were not yet yielded."""
        while self._events:
            yield self._events.popleft()
