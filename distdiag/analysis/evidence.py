"""Everything that was found below some paths, by rank, and what could not be used and why."""

import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from distdiag.analysis.order import in_order
from distdiag.analysis.reading import Contents, read_files
from distdiag.analysis.run_folders import (
    RunFolder,
    TimedEvent,
    all_run_folders,
    is_run_folder,
    merged,
    newest_run,
)
from distdiag.config import Config
from distdiag.dumps.files import printable
from distdiag.dumps.flight_recorder.recording import Recording, RecordingDump
from distdiag.dumps.flight_recorder.run import RecordedRun
from distdiag.dumps.logs.group_reports import ReportDump, ReportedRun
from distdiag.dumps.ranks import Resolved, resolve_ranks
from distdiag.dumps.reading import RankDump
from distdiag.engine.hangs.stall import MIN_THRESHOLD_S, SAME_CALL_PATIENCE
from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.events.lifecycle import ProcessNamed
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import FaultLogged, Observed, Stacks
from distdiag.findings.finding import ReadFile
from distdiag.findings.known_faults import known_faults
from distdiag.record.wire import Interner

LONG_S: Final = SAME_CALL_PATIENCE * MIN_THRESHOLD_S
"""Ranks that all wait in one call, and have done so for this long, count as standing still."""
ASSUMED_PAUSE_S: Final = 600.0
"""Where nothing tells how long the ranks had stood still: the default timeout of NCCL, in s."""
MOVING_S: Final = 5.0
"""A job that was dumped so soon after its last call had not stood still, in seconds."""
MOST_NAMED: Final = 5
_PLURALS: Final = {
    "flight recorder": "flight-recorder dumps",
    "launcher's summary": "launchers' summaries",
    "log": "logs",
    "run directory": "run directories",
}


_TIMED_OUT: Final = frozenset({"timeout", "dump-signal", "watchdog-stuck", "monitored-barrier"})


class Pause(NamedTuple):
    """How long the ranks had stood still, in seconds; where nobody knows it, it is assumed."""

    seconds: float
    is_known: bool


@dataclass(slots=True)
class Evidence:
    """What is left of one job.

    `problems` is one line for each file that could not be used; `gaps` says the same and more by
    name and reason. `labels` are the names of processes whose ranks are not known. `files` are
    those that were read.
    """

    folders: tuple[RunFolder, ...]
    recorded: RecordedRun | None
    reported: ReportedRun
    events: Mapping[int, Sequence[Event]]
    recordings: Mapping[int, RecordingDump]
    labels: Mapping[int, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    gaps: dict[str, str] = field(default_factory=dict)
    files: Sequence[ReadFile] = ()

    @property
    def given(self) -> str:
        """What was given, in words, as in ``logs and stacks``."""
        kinds = list(dict.fromkeys(kind for file in self.files for kind in file.kinds))
        words = [_PLURALS.get(kind, kind) for kind in sorted(kinds)]
        return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

    @property
    def source_folders(self) -> Iterator[Path]:
        """The folders whose source may be quoted: this one, and those of the runs that were given.

        What a run says of itself counts unless that is the home directory or a folder above it.
        """
        yield Path.cwd()
        files = filter(None, (folder.launch_file for folder in self.folders))
        for file in files:
            script = next((word for word in file.command if word.endswith(".py")), "")
            for named in (Path(file.cwd), (Path(file.cwd) / script).parent):
                with suppress(OSError, ValueError, RuntimeError):  # no folder has such a name
                    if not Path.home().is_relative_to(named.resolve()):
                        yield named.resolve()

    @property
    def observed(self) -> RankSet:
        """The ranks of which anything is known."""
        of_folders = (rank for folder in self.folders for rank in folder.ranks)
        return RankSet([*of_folders, *self.recordings, *self.events, *self.reported.ranks])

    @property
    def members(self) -> RankSet:
        """The ranks that the job had, as far as its parts name them."""
        ranks = {*self.observed, *self.reported.members}
        if self.recorded is not None:
            ranks |= set(self.recorded.members)
        for folder in self.folders:
            if (file := folder.launch_file) is not None:
                ranks |= set(range(file.launch.world_size))
        return RankSet(ranks)

    @property
    def has_only_stacks(self) -> bool:
        """Whether nothing tells what the ranks did, except for where they stood at one moment."""
        if self.folders or self.recordings or self.reported.ranks:
            return False
        events = [event for own in self.events.values() for event in own]
        is_seen = any(isinstance(event, Stacks) and not event.error for event in events)
        return is_seen and all(_says_no_more_than_stacks(event) for event in events)

    @property
    def has_timed_out(self) -> bool:
        """Whether a rank wrote that a collective or message of its own did not end in time."""
        observed = (e for own in self.events.values() for e in own if isinstance(e, Observed))
        return any(event.values.get("kind") in _TIMED_OUT for event in observed)

    @property
    def config(self) -> Config:
        """How the run was observed and judged, as far as it is known."""
        for folder in self.folders:
            if (file := folder.launch_file) is not None:
                with suppress(DamagedFileError):
                    return Config.from_json(msgspec.json.encode(file.config))
        return Config()

    def of_runs(self) -> Iterator[TimedEvent]:
        """Yield what the run directories hold, by one clock."""
        # What other files tell has the time of the wall clock.
        yield from merged(self.folders, Interner(), by_wall_clock=bool(self.events))
        for folder in self.folders:
            if folder.problem:
                self.gaps[f"what the monitor saw in {folder.run_dir.root}"] = folder.problem

    def sources(self) -> Iterator[Iterator[Event]]:
        """Yield what other files hold, one iterator for each rank."""
        yield from (iter(events) for events in self.events.values())
        if self.recorded is not None:
            yield from (self.recorded.events(rank) for rank in self.recordings)
        yield from (self.reported.events(rank) for rank in self.reported.ranks)

    def pause(self) -> Pause:
        """Return how long the ranks had stood still; ask when all events have been read."""
        known = [folder.pause_s for folder in self.folders]
        timed_out_s = self.reported.lasted_s
        guessed = []
        if self.recorded is not None:
            timed_out_s = max(timed_out_s, _timed_out_s(self.recordings))
            if not self.recorded.is_waiting:
                known.append(0.0)
            elif not timed_out_s:
                written_s = _written_after_s(self.recordings)
                guessed += [] if written_s is None else [written_s]
        if timed_out_s >= LONG_S:
            known.append(timed_out_s)
        elif timed_out_s:
            guessed.append(ASSUMED_PAUSE_S)  # too short to count as a stall by itself, and it was
        if known and max(known) >= max(guessed, default=0.0):
            return Pause(max(known), is_known=True)
        self.gaps["duration of the standstill"] = "the files do not say it"
        return Pause(max(guessed, default=ASSUMED_PAUSE_S), is_known=False)


def _says_no_more_than_stacks(event: Event) -> bool:
    """Say whether an event tells nothing of what a rank did, nor why it stands still."""
    if isinstance(event, FaultLogged):
        return event.fault in _CONSEQUENCES
    return isinstance(event, Stacks | Observed | ProcessNamed)


_CONSEQUENCES: Final = frozenset(row.id for row in known_faults() if row.role == "consequence")


def gather(
    paths: Sequence[Path],
    ranks_by_file: Mapping[str, int],
    progress: Callable[[int], None],
    stream: BinaryIO | None = None,
) -> Evidence:
    """Read everything below the paths, and out of a pipe.

    Raises:
        UsageError: there is nothing that can be checked, or more than one run.

    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise UsageError(f"{missing[0]} does not exist")
    found = all_run_folders(paths)
    folders = newest_run(found, paths)
    contents = read_files(paths, skip_folder=is_run_folder, progress=progress, stream=stream)
    resolved = resolve_ranks(contents.dumps, ranks_by_file, siblings=contents.foreign)
    unsigned = _unsigned(contents.dumps, resolved.dumps)
    problems = [*contents.problems, *_problems_of(contents, resolved, ranks_by_file)]
    gaps = _as_gaps(problems, contents.foreign)
    for folder in found:
        if folder not in folders:
            gaps[printable(str(folder.run_dir.root))] = "not used: an older run; name it to read it"
    if contents.passed_over:
        gaps["passed over in the folders"] = _counts(contents.passed_over)
    recordings = _newest_recordings(resolved.dumps)
    if recordings and folders:
        gaps["flight-recorder dumps"] = "not used: the event files of the run know more"
        recordings = {}
    events: dict[int, list[Event]] = {
        rank: [ProcessNamed(rank=rank, seq=-1, time_ns=0, label=label)]
        for rank, label in resolved.labels.items()
    }
    for dump in in_order(resolved.dumps):
        if dump.rank is not None and dump.events:
            events.setdefault(dump.rank, []).extend(dump.events)
    ranks = {*recordings, *events, *(rank for folder in folders for rank in folder.ranks)}
    labels = resolved.labels | _keep(unsigned, events, ranks)
    recorded = _recorded(recordings)
    reported = _reported(resolved, folders, recordings)
    files = (*_as_files(folders), *_with_ranks(contents, resolved.dumps))
    evidence = Evidence(
        folders, recorded, reported, events, recordings, labels, problems, gaps, files
    )
    if not evidence.observed:
        known = {file.path: file.problem for file in files if file.path not in contents.foreign}
        reasons = "; ".join(f"{what}: {why}" for what, why in (known | gaps).items())
        raise UsageError(f"nothing that can be checked was found{': ' if reasons else ''}{reasons}")
    return evidence


def _keep(
    unsigned: Sequence[FaultLogged], events: dict[int, list[Event]], known: Collection[int]
) -> dict[int, str]:
    """Put lines that nobody signed among the events of some rank; name it if none is known."""
    if not unsigned:
        return {}
    keeper, labels = min(known, default=0), {}
    if not known:
        labels[keeper] = f"a process in {posixpath.basename(unsigned[0].file)}"
        events[keeper] = [ProcessNamed(rank=keeper, seq=-1, time_ns=0, label=labels[keeper])]
    events.setdefault(keeper, []).extend(
        msgspec.structs.replace(line, rank=keeper, is_rank_known=False) for line in unsigned
    )
    return labels


def _reported(
    resolved: Resolved,
    folders: Sequence[RunFolder],
    recordings: Mapping[int, RecordingDump],
) -> ReportedRun:
    """Return what logs say of calls, of which event files and flight recorders know more."""
    is_known_better = folders or recordings
    reports = [d for d in resolved.dumps if isinstance(d, ReportDump) and not is_known_better]
    ranks = {dump.rank for dump in resolved.dumps if dump.rank is not None} if reports else set()
    return ReportedRun(reports, ranks, resolved.labels)


def _unsigned(dumps: Sequence[RankDump], resolved: Sequence[RankDump]) -> list[FaultLogged]:
    """Return the lines of known faults of which nothing says whose they are."""
    known = {line.file: set[tuple[str, int]]() for d in dumps for line in _faults(d)}
    for dump in resolved:
        for line in _faults(dump):
            known[line.file].add((line.fault, line.place))
    lines = (line for dump in dumps if dump.rank is None for line in _faults(dump))
    return [line for line in lines if (line.fault, line.place) not in known[line.file]]


def _faults(dump: RankDump) -> list[FaultLogged]:
    return [event for event in dump.events if isinstance(event, FaultLogged)]


def _problems_of(
    contents: Contents, resolved: Resolved, ranks_by_file: Mapping[str, int]
) -> Sequence[str]:
    """Return what the user must tell; for lines of known faults a rank is not needed."""
    dumps = contents.dumps
    explained = {dump.path for dump in dumps if dump.rank is None and _faults(dump)}
    explained |= {dump.path for dump in resolved.dumps if dump.rank in resolved.labels}
    others = [d for d in dumps if d.path not in explained or not _is_seen_from_outside(d)]
    if not resolved.problems or len(others) == len(dumps):
        return resolved.problems
    return resolve_ranks(others, ranks_by_file, siblings=contents.foreign).problems


def _is_seen_from_outside(dump: RankDump) -> bool:
    """Say whether a dump holds only what the lines of known faults tell as well."""
    if isinstance(dump, RecordingDump):
        return False
    return all(isinstance(event, FaultLogged | Observed) for event in dump.events)


def _as_files(folders: Sequence[RunFolder]) -> Iterator[ReadFile]:
    for folder in folders:
        yield ReadFile(
            path=printable(str(folder.run_dir.root)),
            kinds=("run directory",),
            ranks=RankSet(folder.ranks),
        )


def _with_ranks(contents: Contents, resolved: Sequence[RankDump]) -> Iterator[ReadFile]:
    """Yield the files that were read with the ranks that they are of, or why that is unknown."""
    ranks: dict[str, set[int]] = {}
    for dump in resolved:
        if dump.rank is not None:
            ranks.setdefault(dump.path, set()).add(dump.rank)
    for file in contents.files:
        known = ranks.get(file.path, set())
        if known or not file.kinds:
            yield msgspec.structs.replace(file, ranks=RankSet(known))
        else:
            why = "; ".join(filter(None, [file.problem, "neither content nor name tells its rank"]))
            yield msgspec.structs.replace(file, problem=why)


def _counts(numbers: Mapping[str, int]) -> str:
    """Return ``214 files of sources, 3 of checkpoints``, and how to have them read."""
    first, *rest = (f"{number:,} files of {kind}" for kind, number in numbers.items())
    counted = ", ".join([first, *(each.replace(" files of", " of") for each in rest)])
    return f"{counted}; name a file to have it read"


def _recorded(recordings: Mapping[int, RecordingDump]) -> RecordedRun | None:
    if not recordings:
        return None
    return RecordedRun({rank: dump.recording for rank, dump in recordings.items()})


def _newest_recordings(dumps: Sequence[RankDump]) -> dict[int, RecordingDump]:
    """Return one recording for each rank: the newest, and of equally new ones that with stacks."""
    best: dict[int, RecordingDump] = {}
    for dump in dumps:
        if isinstance(dump, RecordingDump) and dump.rank is not None:
            other = best.get(dump.rank)
            if other is None or _age(other.recording) < _age(dump.recording):
                best[dump.rank] = dump
    return dict(sorted(best.items()))


def _age(recording: Recording) -> tuple[int, bool]:
    return (recording.newest_ns, recording.has_stacks)


def _timed_out_s(recordings: Mapping[int, RecordingDump]) -> float:
    return max((dump.recording.timed_out_s for dump in recordings.values()), default=0.0)


def _written_after_s(recordings: Mapping[int, RecordingDump]) -> float | None:
    """Return how long after the last call of all the first dump was written, in seconds.

    A file that was copied is younger than the dump, so that is at most a guess.
    """
    newest_ns = max(dump.recording.newest_ns for dump in recordings.values())
    try:
        written_ns = min(Path(dump.path).stat().st_mtime_ns for dump in recordings.values())
    except OSError:  # members of archives
        return None
    if not written_ns > newest_ns > 0:
        return None
    pause_s = (written_ns - newest_ns) / 1e9
    return pause_s if pause_s > MOVING_S else 0.0


def _as_gaps(problems: Sequence[str], foreign: Sequence[str]) -> dict[str, str]:
    gaps: dict[str, str] = {}
    for problem in problems:
        what, _, why = problem.partition(": ")
        gaps[what] = f"{gaps[what]}; {why}" if what in gaps else why
    if foreign:
        named = ", ".join(foreign[:MOST_NAMED])
        more = f" and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
        gaps["files of no known kind"] = f"{named}{more}"
    return gaps
