"""Order by files: a rank that saw one appear or vanish comes after it, and locks exclude."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from distdiag.engine.replay import Replay
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import FileAction

_MOST_PATHS: Final = 100_000
_MOST_PER_RANK: Final = 8
_LOOK_AHEAD: Final = 256

_APPEARING: Final = frozenset(
    {
        FileAction.WRITE,
        FileAction.APPEND,
        FileAction.RENAME,
        FileAction.LINK,
        FileAction.MAKE_DIR,
    }
)
_VANISHING: Final = frozenset({FileAction.REMOVE, FileAction.REMOVE_TREE})
_TRYING: Final = frozenset({FileAction.READ, FileAction.CONNECT})
_LOCKING: Final = frozenset({FileAction.LOCK, FileAction.UNLOCK})

_Log = OrderedDict[str, dict[int, deque[TimedAccess]]]


class PathEdges:
    """Where paths came from, went to and were unlocked, as far as records of it have come.

    `lock_paths` are files that serve as locks, by ``flock`` or by being there.
    """

    def __init__(self) -> None:
        """Know of no path."""
        self.lock_paths: set[str] = set()
        self._appeared: _Log = OrderedDict()
        self._appeared_in: _Log = OrderedDict()
        self._vanished: _Log = OrderedDict()
        self._unlocked: _Log = OrderedDict()
        self._taken: set[tuple[str, int]] = set()

    def announce(self, access: TimedAccess) -> None:
        """Take in an access as its record comes."""
        event = access.event
        action, path = event.action, event.path
        if action in _APPEARING:
            _add(self._appeared, path, access)
            _add(self._appeared_in, path.rpartition("/")[0], access)
        if action in _VANISHING:
            _add(self._vanished, path, access)
        if action is FileAction.RENAME:
            _add(self._vanished, event.origin, access)
        if action is FileAction.UNLOCK:
            _add(self._unlocked, path, access)
        if action in _LOCKING or (action in _VANISHING and (path, event.rank) in self._taken):
            self.lock_paths.add(path)
        if event.is_exclusive:
            self._taken.add((path, event.rank))

    def deadline(self, replay: Replay, access: TimedAccess) -> int | None:
        """Return until when what others did may have mattered to this access; 0: it does not.

        None means that the rank has to go on first. It is replayed now.
        """
        action = access.event.action
        if action is FileAction.TEST:
            return access.time_ns
        if action is FileAction.LOCK:
            return self._section_end(replay, access)
        if action is FileAction.MAKE_DIR:
            # Whether it failed, since the folder was there, comes next.
            return None if replay.next_ns() is None else 0
        is_retry = action in _TRYING and replay.has_failed(access)
        if is_retry or access.event.is_exclusive or replay.polls_folder(access):
            # It is written down before it happens, and over before anything else does.
            return replay.next_ns()
        return 0

    def _section_end(self, replay: Replay, access: TimedAccess) -> int | None:
        path = access.event.path
        for item in islice(replay.queue, 1, _LOOK_AHEAD):
            if isinstance(item, TimedAccess) and item.event.path == path:
                if item.event.action is FileAction.UNLOCK:
                    return item.time_ns
                if item.event.action is FileAction.LOCK:
                    return replay.next_ns()  # this attempt failed, or the lock was held already
        return replay.next_ns() if len(replay.queue) >= _LOOK_AHEAD else None

    def sources(self, access: TimedAccess, deadline_ns: int) -> Iterator[TimedAccess]:
        """Yield what this access comes after, among what others did until then."""
        event = access.event
        if event.action is FileAction.LOCK:
            yield from _until(self._unlocked.get(event.path), access, deadline_ns)
        if event.action is FileAction.LIST:
            yield from _until(self._appeared_in.get(event.path), access, deadline_ns)
        if event.is_exclusive or (event.action is FileAction.TEST and not event.found):
            for path in (event.path, *parents(event.path)):
                yield from _until(self._vanished.get(path), access, deadline_ns)
        if event.action in _TRYING or (
            event.action is FileAction.TEST and event.found is not False
        ):
            yield from _until(self._appeared.get(event.path), access, deadline_ns)
            for path in parents(event.path):
                for source in _until(self._appeared.get(path), access, deadline_ns):
                    # A folder that was renamed brought all its files along.
                    if source.event.action is FileAction.RENAME:
                        yield source


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, innermost first, without the root."""
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def _add(log: _Log, path: str, access: TimedAccess) -> None:
    if path not in log and len(log) >= _MOST_PATHS:
        log.popitem(last=False)
    log.setdefault(path, {}).setdefault(access.rank, deque(maxlen=_MOST_PER_RANK)).append(access)


def _until(
    by_rank: dict[int, deque[TimedAccess]] | None, access: TimedAccess, deadline_ns: int
) -> Iterable[TimedAccess]:
    """Yield the last one of each rank that came in time: it follows those before it."""
    for accesses in (by_rank or {}).values():
        for earlier in reversed(accesses):
            if earlier.time_ns < deadline_ns:
                if access.may_meet(earlier):
                    yield earlier
                break
