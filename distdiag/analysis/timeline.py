"""Let an engine live through what is left of a job: its events, the standstill, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from distdiag.any_event import AnyEvent
from distdiag.engine import Engine
from distdiag.event import Collective, Exited, Heartbeat, Phase, Stacks

START_NS: Final = 1_000_000_000
LOOK_NS: Final = 250_000_000
"""The engine looks again after so much time, in nanoseconds of its own clock."""


class Timeline:
    """Feeds an engine what a job did until it was over."""

    def __init__(self, engine: Engine, on_event: Callable[[AnyEvent], None]) -> None:
        """Begin where nothing has happened yet; `on_event` is shown every event."""
        self._engine = engine
        self._on_event = on_event
        self._exits: list[Exited] = []
        self._beats: dict[int, Heartbeat] = {}
        self._now_ns = START_NS
        engine.tick(START_NS)

    def feed(self, sources: Iterable[Iterator[AnyEvent]]) -> None:
        """Feed all events, one of each source in turn, so that no rank is far ahead.

        The ends of processes are kept back: the standstill before them comes first.
        """
        turns = list(sources)
        while turns:
            turns = [source for source in turns if self._feed_next(source)]

    def _feed_next(self, source: Iterator[AnyEvent]) -> bool:
        event = next(source, None)
        if event is None:
            return False
        self._on_event(event)
        match event:
            case Exited():
                self._exits.append(event)
            case Heartbeat():
                self._beats[event.rank] = event
            case Collective() | Stacks(error="") if event.rank not in self._beats:
                # Whose stacks were dumped was alive, and so was who made a call.
                self._beats[event.rank] = _sign_of_life(event.rank)
                self._engine.feed(event)
            case _:
                self._engine.feed(event)
        return True

    def stand_still(self, pause_s: float) -> None:
        """Let so much time pass in which no event comes, in seconds."""
        self._beat()
        self._now_ns += int(pause_s * 1e9)
        self._beat()
        self._engine.tick(self._now_ns)
        for rank in self._engine.evidence_wanted:
            self._engine.feed(
                Stacks(
                    rank=rank,
                    seq=-1,
                    time_ns=self._now_ns,
                    source="dumps",
                    error="there is no dump of its stacks",
                )
            )
        self._tick()

    def end(self) -> None:
        """Feed the ends of the processes, and let the engine conclude."""
        for event in self._exits:
            self._engine.feed(event)
        self._tick()
        self._engine.finish()

    def _beat(self) -> None:
        for beat in self._beats.values():
            now = msgspec.structs.replace(beat, time_ns=self._now_ns, beat_ns=self._now_ns)
            self._engine.feed(now)

    def _tick(self) -> None:
        self._now_ns += LOOK_NS
        self._engine.tick(self._now_ns)


def _sign_of_life(rank: int) -> Heartbeat:
    return Heartbeat(rank=rank, seq=-1, time_ns=0, phase=Phase.SCRIPT, beat_ns=0)
