"""Find run directories of the tool itself, whole or half-written, and read what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from distdiag.dumps.process.proc import Process
from distdiag.events.base import Event
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.events.lifecycle import Exited, Finished, Heartbeat, Raised, RankStarted
from distdiag.record.run_dir import LaunchFile, RunDir
from distdiag.record.status_page import read_status
from distdiag.record.wire import Canon
from distdiag.transports.files import LocalFiles

DEEPEST: Final = 4
"""So deep below a folder that the user names run directories are looked for."""

_ENDLESS_NS: Final = 1 << 62


class RunFolder:
    """The last attempt of a run on one node, as its run directory holds it."""

    def __init__(self, root: Path, attempt: int) -> None:
        """Look for the files of the ranks; nothing is read of them yet."""
        self.run_dir = RunDir(root, attempt)
        names = (path.name for path in self.run_dir.folder.glob("rank-*.*.events"))
        numbers = (name.removeprefix("rank-").partition(".")[0] for name in names)
        self.ranks = sorted({int(number) for number in numbers if number.isdecimal()})
        self.pause_s = 0.0
        """How long its ranks lived on after their last event, known once all events are read."""
        self._offsets_ns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}

    @property
    def launch_file(self) -> LaunchFile | None:
        """What was launched, if that can still be read."""
        try:
            return msgspec.json.decode(self.run_dir.launch.read_bytes(), type=LaunchFile)
        except (OSError, *UNDECODABLE):
            return None

    def events(self, canon: Canon) -> Iterator[Event]:
        """Yield all events, those of one rank in order; ends have the time of the wall clock.

        What cannot be read is a `ProbeDisabled` of its rank. The last thing of each rank is its
        `Exited`, unless its process lives on this machine. Equal values are one object of `canon`.
        """
        files = LocalFiles(self.run_dir, self.ranks, Process, canon, clock=lambda: _ENDLESS_NS)
        with files as source:
            while batch := [e for e in source.poll() if not isinstance(e, Heartbeat)]:
                for event in batch:
                    if isinstance(event, Exited):
                        yield from self._heartbeat(event.rank)
                    yield self._told(event)

    def _heartbeat(self, rank: int) -> Iterator[Heartbeat]:
        """Yield what the status page says that the rank did when it was last alive."""
        try:
            status = read_status(self.run_dir.status(rank))
        except (OSError, DamagedFileError):
            return
        yield Heartbeat(
            rank=rank,
            seq=-1,
            time_ns=status.beat_ns,
            step=status.step,
            phase=status.phase,
            beat_ns=status.beat_ns,
            num_batches=status.num_batches,
            num_backwards=status.num_backwards,
        )

    def _told(self, event: Event) -> Event:
        rank = event.rank
        if event.seq >= 0:
            self._last_ns[rank] = event.time_ns
        match event:
            case RankStarted():
                self._offsets_ns[rank] = event.unix_ns - event.time_ns
            case Exited() | Finished() | Raised():
                if isinstance(event, Exited) and rank in self._last_ns:
                    lived_on_s = (event.time_ns - self._last_ns[rank]) / 1e9
                    self.pause_s = max(self.pause_s, lived_on_s)
                # The monotonic clocks of two nodes have nothing in common.
                time_ns = event.time_ns + self._offsets_ns.get(rank, 0)
                return msgspec.structs.replace(event, time_ns=time_ns)
        return event


def find_run_folders(paths: Sequence[Path]) -> tuple[RunFolder, ...]:
    """Return the run directories among the paths and below them: the nodes of one run.

    Raises:
        UsageError: two of them hold the same rank, so they are not of one run.

    """
    roots = {root.resolve(): root for path in paths for root in _roots(path, DEEPEST)}
    newest = (_newest_attempt(root) for root in roots.values())
    folders = tuple(folder for folder in newest if folder is not None)
    owners: dict[int, Path] = {}
    for folder in folders:
        for rank in folder.ranks:
            other = owners.setdefault(rank, folder.run_dir.root)
            if other != folder.run_dir.root:
                raise UsageError(
                    f"{other} and {folder.run_dir.root} both hold rank {rank}; "
                    "analyze one run at a time"
                )
    return folders


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder is a run directory, so that its files are no foreign dumps."""
    return any(folder.glob("attempt-*/rank-*.events"))


def _roots(path: Path, depth: int) -> Iterator[Path]:
    if not path.is_dir() or (path.is_symlink() and depth < DEEPEST):
        return
    if is_run_folder(path):
        yield path
    elif depth > 0:
        for child in sorted(path.iterdir()):
            yield from _roots(child, depth - 1)


def _newest_attempt(root: Path) -> RunFolder | None:
    numbers = (path.name.removeprefix("attempt-") for path in root.glob("attempt-*"))
    attempts = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
    folders = (RunFolder(root, attempt) for attempt in attempts)
    return next((folder for folder in folders if folder.ranks), None)
