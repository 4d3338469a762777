"""Find run directories of the tool itself, whole or half-written, and read what is in them."""

import heapq
import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from distdiag.dumps.bystanders import is_skipped_folder
from distdiag.dumps.process.proc import Process
from distdiag.events.base import Event
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.events.lifecycle import (
    EventsLost,
    Exited,
    Heartbeat,
    Monitored,
    ProbeDisabled,
    RankStarted,
)
from distdiag.findings.finding import Finding
from distdiag.findings.report_json import decode_report
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import LaunchFile, RunDir, attempts_of
from distdiag.record.status_page import read_status
from distdiag.record.wire import Interner
from distdiag.transports.files import LocalFiles
from distdiag.transports.forwarder import shifted
from distdiag.transports.journal import read_journal

DEEPEST: Final = 4
"""So deep below a folder that the user names run directories are looked for."""

_ENDLESS_NS: Final = 1 << 62


TimedEvent = tuple[int, Event]


class RunFolder:
    """The last attempt of a run on one node, as its run directory holds it.

    `ends` are the ends of ranks that no monitor has noted, `beats` what their status pages say that
    they did last, `pause_s` how long they lived on after their last event, and `problem` why what
    the monitor has noted cannot be read: known once all events are read.
    """

    def __init__(self, root: Path, attempt: int) -> None:
        """Look for the files of the ranks; nothing is read of them yet."""
        self.run_dir = RunDir(root, attempt)
        names = (path.name for path in self.run_dir.folder.glob("rank-*.*.events"))
        numbers = (name.removeprefix("rank-").partition(".")[0] for name in names)
        self.ranks = sorted({int(number) for number in numbers if number.isdecimal()})
        self.ends: list[Exited] = []
        self.beats: list[Heartbeat] = []
        self.pause_s = 0.0
        self.problem = ""
        self.offset_ns = 0
        """How far the wall clock is ahead of this node's own, known when a rank has begun."""

    @property
    def launch_file(self) -> LaunchFile | None:
        """What was launched, if that can still be read."""
        try:
            return msgspec.json.decode(read_regular(self.run_dir.launch), type=LaunchFile)
        except (OSError, *UNDECODABLE):
            return None

    def reported(self) -> tuple[Finding, ...]:
        """Return what the monitor had found when it wrote its report last."""
        try:
            report = decode_report(read_regular(self.run_dir.report))
        except (OSError, DamagedFileError):
            return ()
        return (*report.findings, *(each.finding for each in report.ignored))

    def began_s(self) -> float:
        """Return when the run was launched, in seconds since 1970; 0 if that is lost."""
        file = self.launch_file
        return file.launch.started_s if file is not None else 0.0

    def timed_events(self, canon: Interner) -> Iterator[TimedEvent]:
        """Yield all events in the order of this node's clock, each with its time.

        They are those of the ranks, in their order, and what the monitor has noted. What cannot be
        read is a `ProbeDisabled` of its rank. Equal values are one object of `canon`.
        """
        noted: list[Event] = []
        try:
            noted.extend(read_journal(self.run_dir.journal, canon))
        except FileNotFoundError:
            pass
        except (OSError, DamagedFileError) as error:
            self.problem = str(error)
        # What a monitor read too late may still have been there; the files tell what is gone now.
        noted = [event for event in noted if not isinstance(event, EventsLost)]
        streams = [self._of_rank(rank, canon, noted) for rank in self.ranks]
        yield from heapq.merge(*streams, _timed(noted), key=itemgetter(0))

    def _of_rank(self, rank: int, canon: Interner, noted: Sequence[Event]) -> Iterator[TimedEvent]:
        """Yield what a rank wrote, and what its files tell now and nobody has noted before."""
        known = {_kind(event) for event in noted if event.rank == rank}
        is_over = any(isinstance(e, Monitored) and e.act == "ended" for e in noted)
        last_ns = 0
        files = LocalFiles(self.run_dir, [rank], Process, canon, clock=lambda: _ENDLESS_NS)
        with files as source:
            while batch := [e for e in source.poll() if not isinstance(e, Heartbeat)]:
                for event in batch:
                    if event.seq < 0 and _kind(event) in known:
                        continue
                    if isinstance(event, Exited):
                        if not is_over:
                            self._note_end(event, last_ns)
                        continue
                    if event.seq >= 0:
                        last_ns = max(last_ns, event.time_ns)
                    if isinstance(event, RankStarted) and not self.offset_ns:
                        self.offset_ns = event.unix_ns - event.time_ns
                    yield last_ns, event

    def _note_end(self, end: Exited, last_ns: int) -> None:
        """Keep the end of a rank that no monitor saw, at the time of its last sign of life."""
        try:
            status = read_status(self.run_dir.status(end.rank))
        except (OSError, DamagedFileError):
            self.ends.append(msgspec.structs.replace(end, time_ns=last_ns))
            return
        alive_ns = max(status.beat_ns, last_ns)
        self.pause_s = max(self.pause_s, (alive_ns - last_ns) / 1e9)
        self.ends.append(msgspec.structs.replace(end, time_ns=alive_ns))
        self.beats.append(
            Heartbeat(
                rank=end.rank,
                seq=-1,
                time_ns=status.beat_ns,
                step=status.step,
                phase=status.phase,
                beat_ns=status.beat_ns,
                num_batches=status.num_batches,
                num_backwards=status.num_backwards,
            )
        )


def _timed(noted: Sequence[Event]) -> Iterator[TimedEvent]:
    """Yield what a monitor noted in its order, which the times of single events do not follow.

    An end was noted when the process was found gone: after all that the rank wrote.
    """
    last_ns = 0
    for event in noted:
        noted_ns = event.gone_ns if isinstance(event, Exited) else 0
        last_ns = max(last_ns, event.time_ns, noted_ns)
        yield last_ns, event


def _kind(event: Event) -> tuple[object, ...]:
    return type(event), event.probe if isinstance(event, ProbeDisabled) else ""


def merged(
    folders: Sequence[RunFolder], canon: Interner, *, by_wall_clock: bool
) -> Iterator[TimedEvent]:
    """Yield the events of all nodes, by the clock of the first one, or by the wall clock."""
    streams = [_peeked(folder.timed_events(canon)) for folder in folders]
    base_ns = 0 if by_wall_clock or not folders else folders[0].offset_ns
    shifts_ns = [folder.offset_ns - base_ns for folder in folders]
    yield from heapq.merge(*map(_shifted, streams, shifts_ns), key=itemgetter(0))


def _peeked(events: Iterator[TimedEvent]) -> Iterator[TimedEvent]:
    """Return the same events, of which the first ones have been read."""
    return chain(list(islice(events, 1)), events)


def _shifted(events: Iterator[TimedEvent], shift_ns: int) -> Iterator[TimedEvent]:
    if not shift_ns:
        yield from events
    for time_ns, event in events:
        yield time_ns + shift_ns, shifted(event, shift_ns)


def find_run_folders(paths: Sequence[Path]) -> tuple[RunFolder, ...]:
    """Return the run directories among the paths and below them: the nodes of one run.

    Of several runs below one folder it is the one that began last.

    Raises:
        UsageError: two of them hold the same rank, so they are not of one run, and both were named
            or began at the same time.

    """
    return newest_run(all_run_folders(paths), paths)


def all_run_folders(paths: Sequence[Path]) -> tuple[RunFolder, ...]:
    """Return the run directories among the paths and below them, whichever runs they are of."""
    roots = {root.resolve(): root for path in paths for root in _roots(path, DEEPEST)}
    newest = (_newest_attempt(root) for root in roots.values())
    return tuple(folder for folder in newest if folder is not None)


def newest_run(folders: Sequence[RunFolder], named: Sequence[Path]) -> tuple[RunFolder, ...]:
    """Return those of the newest run, in their order; `named` are what the user asked for.

    Raises:
        UsageError: it is not clear which run is meant.

    """
    kept: list[RunFolder] = []
    for folder in sorted(folders, key=RunFolder.began_s, reverse=True):
        other = next((o for o in kept if not set(folder.ranks).isdisjoint(o.ranks)), None)
        if other is None:
            kept.append(folder)
            continue
        roots = [other.run_dir.root, folder.run_dir.root]
        if other.began_s() == folder.began_s() or all(root in named for root in roots):
            rank = min(set(folder.ranks) & set(other.ranks))
            first, second = sorted(roots)
            raise UsageError(
                f"{first} and {second} both hold rank {rank}; analyze one run at a time"
            )
    return tuple(folder for folder in folders if folder in kept)


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder is a run directory, so that its files are no foreign dumps."""
    return any(folder.glob("attempt-*/rank-*.events"))


def _roots(path: Path, depth: int) -> Iterator[Path]:
    if not path.is_dir() or (path.is_symlink() and depth < DEEPEST):
        return
    if is_run_folder(path):
        yield path
    elif depth > 0:
        for child in _subfolders(path):
            yield from _roots(child, depth - 1)


def _subfolders(path: Path) -> list[Path]:
    """Return the folders in a folder; a data set of a million files costs one listing."""
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir() and not is_skipped_folder(e.name)]
    except OSError:
        return []
    return [path / name for name in sorted(names)]


def _newest_attempt(root: Path) -> RunFolder | None:
    attempts = sorted(attempts_of(root), reverse=True)
    folders = (RunFolder(root, attempt) for attempt in attempts)
    return next((folder for folder in folders if folder.ranks), None)
