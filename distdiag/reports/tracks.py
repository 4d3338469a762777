"""The events of a rank as slices and instants on tracks, in Chrome's trace event format.

The format is "Trace Event Format" of Chromium, which Perfetto reads. A rank is a process, and a
track is a thread of it. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import UNNUMBERED, Collective, CollectiveState
from distdiag.events.files import FileAccess, FileClosed, StoreAsked, StoreCall
from distdiag.events.lifecycle import (
    Exited,
    Finished,
    Heartbeat,
    NodeLost,
    Raised,
    RankStarted,
    Signalled,
    StepEnd,
)
from distdiag.record.recent_events import RecentEvents
from distdiag.record.visible import visible
from distdiag.reports.base import cut

TraceEvent = dict[str, Any]

FINDINGS: Final = 1
STEPS: Final = 2
PHASES: Final = 3
LIFE: Final = 4
STORE: Final = 5
FILES: Final = 6
CALLS: Final = 10
"""The track of the collectives of the first thread; those of further threads follow it."""
_NAMES: Final = {
    FINDINGS: "findings",
    STEPS: "optimizer steps",
    PHASES: "phase (as the monitor saw it)",
    LIFE: "process",
    STORE: "waits for the store",
    FILES: "files",
}
LONGEST_TEXT: Final = 500
MOST_LISTED: Final = 64


class RankTracks:
    """Turns what one rank recorded into trace events.

    `shift_ns` is what takes its own clock to that of the trace.
    `end_ns` is when the recordings end, on the rank's own clock: what had not ended by then, such
    as the call in which a rank hangs, is drawn up to there.
    """

    def __init__(self, rank: int, recent: RecentEvents, shift_ns: int, end_ns: int) -> None:
        self.rank = rank
        self._recent = recent
        self._shift_ns = shift_ns
        self._end_ns = end_ns
        self._threads: dict[str, int] = {}

    def events(self, noted: Sequence[Event]) -> Iterator[TraceEvent]:
        """Yield all that happened on this rank; `noted` is what the monitor saw of all ranks."""
        events = self._recent.events
        yield from self._steps(events)
        yield from self._calls(events)
        yield from self._store_waits(events)
        yield from self._files(events)
        yield from self._life(events)
        of_rank = [event for event in noted if event.rank == self.rank]
        yield from self._life(of_rank)
        yield from self._phases([event for event in of_rank if isinstance(event, Heartbeat)])
        yield from self._names()

    def at_step(self, step: int | None) -> int:
        """Return when a step ended on this rank, or its last event, on its own clock."""
        events = self._recent.events
        ends = (e.time_ns for e in events if isinstance(e, StepEnd) and e.step == step)
        last = events[-1].time_ns if events else self._end_ns
        return next(ends, last)

    def instant(self, track: int, name: str, time_ns: int, **args: object) -> TraceEvent:
        """Return a moment on a track."""
        return self._event(track, name, time_ns, args) | {"ph": "i", "s": "t"}

    def _slice(
        self, track: int, name: str, times_ns: tuple[int, int], args: Mapping[str, object]
    ) -> TraceEvent:
        begin_ns, end_ns = times_ns
        duration_us = max(0, end_ns - begin_ns) / 1000
        return self._event(track, name, begin_ns, args) | {"ph": "X", "dur": duration_us}

    def _event(self, track: int, name: str, time_ns: int, args: Mapping[str, object]) -> TraceEvent:
        return {
            "name": _text(name),
            "cat": "distdiag",
            "pid": self.rank,
            "tid": track,
            "ts": (time_ns + self._shift_ns) / 1000,
            "args": {key: _text(str(value)) for key, value in args.items() if value is not None},
        }

    def _steps(self, events: Iterable[Event]) -> Iterator[TraceEvent]:
        for event in events:
            if isinstance(event, StepEnd):
                begin_ns = event.time_ns - int(event.duration_s * 1e9)
                args = {"backward passes": event.num_backwards}
                yield self._slice(STEPS, f"step {event.step}", (begin_ns, event.time_ns), args)

    def _calls(self, events: Sequence[Event]) -> Iterator[TraceEvent]:
        """Yield the collectives. Of a synchronous call that returned nobody recorded when."""
        states: dict[int, CollectiveState] = {}
        for event in events:
            if isinstance(event, CollectiveState):
                states[event.call] = event
        for call in events:
            if isinstance(call, Collective):
                yield self._call(call, states.get(call.seq))

    def _call(self, call: Collective, state: CollectiveState | None) -> TraceEvent:
        reached = state.state if state is not None else "not issued"
        is_open = state is None or (reached == "issued" and not call.is_async)
        end_ns = state.time_ns if state is not None and not is_open else self._end_ns
        number = call.collective_seq_id
        is_numbered = 0 <= number < UNNUMBERED
        name = f"{call.signature.op} #{number}" if is_numbered else call.signature.op
        args = _call_args(call) | {
            "state": f"{reached}: it had not returned" if is_open else reached
        }
        return self._slice(self._track_of(call.thread), name, (call.time_ns, end_ns), args)

    def _track_of(self, thread: str) -> int:
        return self._threads.setdefault(thread, CALLS + len(self._threads))

    def _store_waits(self, events: Iterable[Event]) -> Iterator[TraceEvent]:
        asked: dict[tuple[str, str], StoreAsked] = {}
        for event in events:
            if isinstance(event, StoreAsked):
                asked[event.thread, event.action] = event
            elif isinstance(event, StoreCall):
                for key in [key for key in asked if set(asked[key].keys) & set(event.keys)]:
                    yield self._store_wait(asked.pop(key), event.time_ns)
        for wait in asked.values():
            yield self._store_wait(wait, self._end_ns)

    def _store_wait(self, wait: StoreAsked, end_ns: int) -> TraceEvent:
        args = {"keys": list(wait.keys[:MOST_LISTED]), "store": wait.store}
        return self._slice(STORE, f"store {wait.action}", (wait.time_ns, end_ns), args)

    def _files(self, events: Sequence[Event]) -> Iterator[TraceEvent]:
        ends = {event.access: event.time_ns for event in events if isinstance(event, FileClosed)}
        for event in events:
            if isinstance(event, FileAccess):
                times_ns = event.time_ns, ends.get(event.seq, event.time_ns)
                args = {"path": event.written, "at": _place(event.site)}
                yield self._slice(FILES, f"{event.action} {event.api}", times_ns, args)

    def _life(self, events: Iterable[Event]) -> Iterator[TraceEvent]:
        for event in events:
            what = _life_of(event)
            if what:
                yield self.instant(LIFE, what, event.time_ns)

    def _phases(self, beats: Sequence[Heartbeat]) -> Iterator[TraceEvent]:
        """Yield a slice for each phase in which heartbeats were seen one after the other."""
        begin = 0
        for number, beat in enumerate(beats):
            following = beats[number + 1] if number + 1 < len(beats) else None
            if following is None or following.phase != beat.phase:
                end_ns = following.time_ns if following is not None else beat.time_ns
                times_ns = beats[begin].time_ns, end_ns
                yield self._slice(PHASES, beat.phase, times_ns, {"step": beat.step})
                begin = number + 1

    def _names(self) -> Iterator[TraceEvent]:
        """Yield what the tracks of this rank are called, and their order."""
        started = self._recent.started
        host = f" on {started.hostname}, pid {started.pid}" if started else ""
        yield self._name("process_name", 0, f"rank {self.rank}{host}")
        yield {"ph": "M", "name": "process_sort_index", "pid": self.rank} | {
            "args": {"sort_index": self.rank}
        }
        calls = {track: f"collectives of {name}" for name, track in self._threads.items()}
        for track, name in (_NAMES | calls).items():
            yield self._name("thread_name", track, name)
            yield {"ph": "M", "name": "thread_sort_index", "pid": self.rank, "tid": track} | {
                "args": {"sort_index": track}
            }

    def _name(self, what: str, track: int, name: str) -> TraceEvent:
        return {"ph": "M", "name": what, "pid": self.rank, "tid": track} | {
            "args": {"name": _text(name)}
        }


def _life_of(event: Event) -> str:
    """Return what became of a rank by an event, "" where the event does not say."""
    match event:
        case RankStarted():
            return "the agent started"
        case Raised():
            return f"raised {event.type}: {event.message}"
        case Signalled():
            return f"handled signal {event.signal}"
        case Finished():
            return f"finished with status {event.exit_status}"
        case Exited():
            return f"the process was gone{f' ({event.status})' if event.status is not None else ''}"
        case NodeLost():
            return f"node {event.hostname} fell silent"
        case _:
            return ""


def _call_args(call: Collective) -> dict[str, object]:
    """Return what a person wants to see of a call that is selected."""
    signature = call.signature
    return {
        "group": call.group.label,
        "group ranks": list(call.group.ranks[:MOST_LISTED]),
        "input sizes": signature.input_sizes[:MOST_LISTED] or None,
        "dtypes": "/".join(signature.dtypes[:MOST_LISTED]) or None,
        "reduce op": signature.reduce_op,
        "peer": signature.peer,
        "step": call.step,
        "at": _place(call.site),
    }


def _place(site: CallSite) -> str | None:
    frame = site.location
    return f"{frame.file}:{frame.line} in {frame.function}" if frame is not None else None


def _text(value: str) -> str:
    return visible(cut(value, LONGEST_TEXT))
