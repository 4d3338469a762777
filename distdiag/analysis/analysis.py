"""From paths to one report."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import msgspec

from distdiag.analysis.advice import what_to_collect
from distdiag.analysis.evidence import Evidence, gather
from distdiag.analysis.run_folders import TimedEvent
from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.config.selection import Selection
from distdiag.engine import Engine
from distdiag.events.base import Event, Phase
from distdiag.events.collectives import Collective, GroupProgress
from distdiag.events.lifecycle import Exited, Heartbeat, Monitored, RankStarted, TorchLoaded
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import Outcome, RankInfo, Report, Run
from distdiag.findings.source import source_only_below
from distdiag.findings.store import with_earlier
from distdiag.record.redaction import redacted
from distdiag.reports.builder import say
from distdiag.views.rank_states import RankState, RankStatus, StackView, last_act

# Say on stderr how far a long analysis is, and what it could not use.

TERMINAL_S: Final = 0.1
LINES_S: Final = 10.0
"""Without a terminal there is a line this often, in seconds."""


class Progress:
    """One line that counts the files on a terminal; a line now and then elsewhere."""

    def __init__(self) -> None:
        """Look where stderr goes; nothing is written yet."""
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = time.monotonic()
        self._width = 0

    def show(self, num_files: int) -> None:
        """Say how many files have been read, if it was not said a moment ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (TERMINAL_S if self._is_terminal else LINES_S):
            return
        self._shown_s = now_s
        text = f"distdiag: {num_files} files read"
        if self._is_terminal:
            self._width = len(text)
            say(f"\r{text}")
        else:
            say(f"{text}\n")

    def complain(self, problem: str) -> None:
        """Say in one line what cannot be used."""
        self._clear()
        say(f"distdiag: {problem}\n")

    def _clear(self) -> None:
        if self._width:
            say(f"\r{' ' * self._width}\r")
            self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()


# Let an engine live through what is left of a job: its events, the standstill, the end.

START_NS: Final = 1_000_000_000
LOOK_NS: Final = 250_000_000
"""The engine looks again after so much time, in nanoseconds of its own clock."""


READ_LATE_NS: Final = 250_000_000
"""A live monitor has counted so much from its last look when it reads an event, in nanoseconds."""


class Timeline:
    """Feeds an engine what a job did until it was over."""

    def __init__(
        self, engine: Engine, on_event: Callable[[Event], None], *, has_records: bool = True
    ) -> None:
        """Begin where nothing has happened yet; `on_event` is shown every event.

        Without `has_records` stacks are all that is known: they are no sign of what came before.
        """
        self.was_concluded = False
        """A monitor has seen the whole run: nothing is left to be assumed."""
        self._engine = engine
        self._has_records = has_records
        self._on_event = on_event
        self._exits: list[Exited] = []
        self._beats: dict[int, Heartbeat] = {}
        self._alive: set[int] = set()
        self._new_stacks: dict[int, Stacks] = {}
        self._now_ns = 0

    def replay(self, events: Iterable[TimedEvent]) -> None:
        """Feed the events of ranks that a monitor has watched, and look when it did."""
        for now_ns, event in events:
            if event.rank not in self._engine.world:
                continue  # the files of that rank are not here
            if not self._now_ns:
                self._engine.tick(now_ns)
            self._now_ns = max(self._now_ns, now_ns)
            self._on_event(event)
            match event:
                case Monitored(act="looked"):
                    self._look()
                case Monitored(act="ended"):
                    self.was_concluded = True
                case _:
                    self._engine.advance(self._now_ns - READ_LATE_NS)
                    self._follow(event)
                    self._engine.feed(event)

    def _look(self) -> None:
        self._engine.tick(self._now_ns)
        for rank in self._engine.evidence_wanted:
            if rank in self._new_stacks:
                self._engine.feed(self._new_stacks[rank])
        self._new_stacks.clear()
        self._engine.settle()

    def _follow(self, event: Event) -> None:
        match event:
            case Heartbeat():
                self._beats[event.rank] = event
            case Collective():
                self._alive.add(event.rank)
            case Stacks(is_native=False):
                self._new_stacks[event.rank] = event
            case Exited():
                self._beats.pop(event.rank, None)
                self._alive.discard(event.rank)

    def feed(self, sources: Iterable[Iterator[Event]]) -> None:
        """Feed all events, one of each source in turn, so that no rank is far ahead.

        The ends of processes are kept back: the standstill before them comes first.
        """
        if not self._now_ns:
            self._now_ns = START_NS
            self._engine.tick(START_NS)
        turns = list(sources)
        while turns:
            turns = [source for source in turns if self._feed_next(source)]

    def _feed_next(self, source: Iterator[Event]) -> bool:
        event = next(source, None)
        if event is None:
            return False
        self._on_event(event)
        match event:
            case Exited():
                self._exits.append(event)
            case Heartbeat():
                self._beats[event.rank] = event
            case Collective() | GroupProgress() | Stacks(error="") if self._is_first(event):
                # Whose stacks were dumped was alive, and so was who made a call.
                self._beats[event.rank] = _sign_of_life(event.rank)
                self._engine.feed(event)
            case _:
                self._engine.feed(event)
        return True

    def _is_first(self, event: Event) -> bool:
        """Whether an event is the first sign of life of its rank, and shows that it lived on."""
        is_sign = self._has_records or not isinstance(event, Stacks)
        return is_sign and event.rank not in self._beats

    def keep(self, beats: Iterable[Heartbeat], ends: Iterable[Exited]) -> None:
        """Take in what ranks did last and that they are gone, where no monitor has seen it."""
        self._beats |= {beat.rank: beat for beat in beats}
        self._exits.extend(ends)

    @property
    def is_anyone_left(self) -> bool:
        """Whether a rank is known to have lived on after its last event."""
        return bool(self._alive or self._beats)

    def bury(self) -> None:
        """Feed the ends of ranks of which nothing else is known: they cannot stand still."""
        known = self._alive | self._beats.keys()
        for event in self._exits:
            if event.rank not in known:
                self._engine.feed(event)
        self._exits = [event for event in self._exits if event.rank in known]

    def stand_still(self, pause_s: float, *, is_known: bool = True) -> None:
        """Let so much time pass in which no event comes, in seconds; it may be assumed."""
        if not is_known:
            self._engine.assume_time()
        for rank in self._alive - self._beats.keys():
            self._beats[rank] = _sign_of_life(rank)
        self._beat()
        self._now_ns += int(pause_s * 1e9)
        self._beat()
        self._engine.tick(self._now_ns)
        for rank in self._engine.evidence_wanted:
            self._engine.feed(self._new_stacks.get(rank) or self._no_stacks(rank))
        self._tick()
        self._engine.settle()

    def _no_stacks(self, rank: int) -> Stacks:
        return Stacks(
            rank=rank,
            seq=-1,
            time_ns=self._now_ns,
            source="dumps",
            error="there is no dump of its stacks",
        )

    def end(self) -> None:
        """Feed the ends of the processes, and let the engine conclude."""
        for event in self._exits:
            self._engine.feed(event)
        self._tick()
        self._engine.finish()
        self._engine.settle()

    def _beat(self) -> None:
        for beat in self._beats.values():
            now = msgspec.structs.replace(beat, time_ns=self._now_ns, beat_ns=self._now_ns)
            self._engine.feed(now)

    def _tick(self) -> None:
        self._now_ns += LOOK_NS
        self._engine.tick(self._now_ns)


def _sign_of_life(rank: int) -> Heartbeat:
    return Heartbeat(rank=rank, seq=-1, time_ns=0, phase=Phase.SCRIPT, beat_ns=0)


# The analysis itself: evidence in, one report out.

_NOT_ALWAYS_SAID: Final = {"COL005": "reduce_op", "COL006": "root"}
"""What a check needs that a flight recorder leaves out."""
_OF_AGENTS: Final = ("DIA002",)
"""They judge whether ranks were observed by an agent."""


def analyze(
    paths: Sequence[Path],
    *,
    stream: BinaryIO | None = None,
    ranks_by_file: Mapping[str, int] | None = None,
    selection: Selection | None = None,
    progress: Callable[[int], None] = lambda num_files: None,
    complain: Callable[[str], None] = lambda problem: None,
) -> Report:
    """Check what a job left below these paths, and what `stream` says, such as a log in a pipe.

    `ranks_by_file` are the ranks of files whose names and content do not say it, by path or end
    of a path; `progress` gets how many files have been read, and `complain` one line for each that
    cannot be used. These are in the report, too.

    Raises:
        UsageError: there is nothing that can be checked, or the selection fits no check.

    """
    catalogue = load_checks()
    selection = selection or Selection()
    selection.validate(catalogue)
    evidence = gather(paths, ranks_by_file or {}, progress, stream)
    for problem in evidence.problems:
        complain(problem)
    with source_only_below(evidence.source_folders):
        return _judged(evidence, catalogue, selection)


def _judged(
    evidence: Evidence, catalogue: Mapping[str, type[Check[Any]]], selection: Selection
) -> Report:
    config = evidence.config
    unable = _unable(evidence, catalogue)
    engine = Engine(
        [c() for code, c in catalogue.items() if selection.selects(code) and code not in unable],
        evidence.observed,
        hang_timeout_s=config.hang_timeout_s,
        rules=config.plan,
        numerics=config.numerics,
        only_start=config.profile == "light",
    )
    facts = _Facts()
    timeline = Timeline(engine, facts.feed, has_records=not evidence.has_only_stacks)
    timeline.replay(evidence.of_runs())
    timeline.feed(evidence.sources())
    if timeline.was_concluded or evidence.has_only_stacks:
        engine.finish()
        engine.settle()
    else:
        for folder in evidence.folders:
            timeline.keep(folder.beats, folder.ends)
        timeline.bury()
        if timeline.is_anyone_left:
            pause = evidence.pause()
            timeline.stand_still(pause.seconds, is_known=pause.is_known)
        timeline.end()
    gaps = evidence.gaps | unable | _left_out(catalogue, selection)
    gaps |= _not_checked(engine, evidence)
    if evidence.recorded is not None:
        gaps |= facts.gaps(engine.checked)
    outcome = engine.rank_status.final() if timeline.was_concluded else _outcome(engine, evidence)
    return _report(evidence, engine, facts, gaps, outcome)


def _unable(evidence: Evidence, catalogue: Mapping[str, type[Check[Any]]]) -> dict[str, str]:
    """Return the checks that need what was not given, and what that is."""
    if evidence.has_only_stacks:
        # As for stacks that were taken of a running job: the others would take a rank without
        # records for one that was never heard of.
        return {
            code: "needs more than stacks"
            for code, check in catalogue.items()
            if StackView not in check.views
        }
    if not evidence.folders:
        return dict.fromkeys((code for code in _OF_AGENTS if code in catalogue), _only(evidence))
    return {}


def _not_checked(engine: Engine, evidence: Evidence) -> dict[str, str]:
    """Return what was not observed. Of what no file can show it is not said that it was not there.

    A run directory holds what all probes saw; logs and dumps hold nothing of most subjects.
    """
    if evidence.folders:
        return engine.not_checked
    return engine.not_checked | dict.fromkeys(sorted(engine.idle), _only(evidence))


def _only(evidence: Evidence) -> str:
    return (
        f"only {evidence.given} were given: checks of models, data, routing and files, and others "
        "that need a run directory, had nothing to look at"
    )


def _left_out(codes: Iterable[str], selection: Selection) -> dict[str, str]:
    reason = "left out by --select or --ignore"
    return {code: reason for code in codes if not selection.selects(code)}


class _Facts:
    """What the events say of the run as a whole."""

    def __init__(self) -> None:
        self.torch = ""
        self.started_ns = 0
        self.command: tuple[str, ...] = ()
        self._recorded: set[str] = set()

    def feed(self, event: Event) -> None:
        match event:
            case Collective():
                self._hear(event)
            case TorchLoaded():
                self.torch = event.torch
            case RankStarted():
                self.command = self.command or event.command
                self.started_ns = min(self.started_ns or event.unix_ns, event.unix_ns)

    def _hear(self, call: Collective) -> None:
        self.started_ns = self.started_ns or call.time_ns
        if len(self._recorded) < len(_NOT_ALWAYS_SAID):
            fields = ("reduce_op", call.signature.reduce_op), ("root", call.signature.root)
            self._recorded |= {name for name, value in fields if value is not None}

    def gaps(self, codes: Collection[str]) -> dict[str, str]:
        """Return which of these checks lack what a flight recorder leaves out."""
        return {
            code: f"no file says the {part} of a collective"
            for code, part in _NOT_ALWAYS_SAID.items()
            if part not in self._recorded and code in codes
        }


def _report(
    evidence: Evidence, engine: Engine, facts: _Facts, gaps: dict[str, str], outcome: Outcome
) -> Report:
    states = engine.states()
    members = evidence.members
    silent = RankSet({*members, *engine.unobserved} - set(evidence.observed))
    if silent:
        gaps[silent.phrase()] = "nothing of them was found"
    named = {rank for finding in engine.findings for rank in finding.ranks}
    for rank, state in states.items():
        if state.incomplete:
            gaps[f"rank {rank}"] = f"not observed wholly: {state.incomplete}"
    findings = engine.findings
    if engine.has_gap:
        seen_live = (finding for each in evidence.folders for finding in each.reported())
        findings = with_earlier(findings, seen_live)
    if not any(state.knows_step for state in states.values()):
        findings = tuple(msgspec.structs.replace(each, step=None) for each in findings)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    started = datetime.fromtimestamp(facts.started_ns / 1e9, UTC)
    return Report(
        complete=True,
        run=Run(
            id=", ".join(str(folder.run_dir.root.name) for folder in evidence.folders) or "dumps",
            command=tuple(redacted(facts.command)),
            world_size=_world_size([*members, *engine.unobserved], evidence.labels),
            ranks=tuple(
                _rank_info(state, len(members), is_aborted=engine.rank_status.is_aborted)
                for state in states.values()
            ),
            torch=facts.torch,
            started=started.isoformat(timespec="milliseconds") if facts.started_ns else now,
            ended=None,
            outcome=outcome,
        ),
        findings=findings,
        checked=tuple(code for code in engine.checked if code not in gaps),
        not_checked=gaps,
        silent_ranks=RankSet(
            rank
            for rank in [*silent, *(r for r, s in states.items() if _is_unknown(s))]
            if rank not in named and rank not in evidence.labels
        ),
        files=tuple(evidence.files),
        next_time=what_to_collect(evidence, engine.findings, outcome),
    )


def _is_unknown(state: RankState) -> bool:
    """Whether nothing was read of a rank, nor seen of it from outside."""
    is_seen = state.stacks is not None and not state.stacks.error
    return state.status is RankStatus.SILENT and not is_seen and not state.observed


def _world_size(ranks: Collection[int], labels: Collection[int]) -> int:
    """Return how many ranks there were at least; processes without a rank may be among them."""
    known = max((rank for rank in ranks if rank not in labels), default=-1) + 1
    return max(known, len(labels))


def _outcome(engine: Engine, evidence: Evidence) -> Outcome:
    outcome = engine.rank_status.outcome
    has_hung = engine.is_hung or evidence.has_timed_out
    return Outcome.HUNG if outcome is Outcome.RUNNING and has_hung else outcome


def _rank_info(state: RankState, world_size: int, *, is_aborted: bool) -> RankInfo:
    started = state.started
    return RankInfo(
        rank=state.rank,
        local_rank=started.local_rank if started else -1,
        world_size=started.world_size if started else world_size,
        hostname=started.hostname if started else "",
        pid=started.pid if started else 0,
        fate="aborted" if is_aborted and state.status is RankStatus.RUNNING else state.status,
        last=last_act(state),
        label=state.label,
    )
