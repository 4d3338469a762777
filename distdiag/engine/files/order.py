"""Decide whose events can be replayed next, and when it is known that a wait is in vain."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar

from distdiag.engine.bounded import Filter, SinceFirst
from distdiag.engine.clocks import NOTHING, Clock, Gate, Stamp
from distdiag.engine.collectives.calls import Meeting
from distdiag.engine.collectives.sync_edges import Senders
from distdiag.engine.files.conflicts import TimedAccess
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import Collective
from distdiag.events.files import FileAction, FileClosed, StoreCall
from distdiag.events.ranks import RankSet
from distdiag.views.files import SyncPoint

# Order by the key-value store: who reads a key comes after who wrote what is read.

_MOST_PUBLISHED: Final = 20_000
_MOST_PER_KEY: Final = 4096

_PUBLISHING: Final = frozenset({"add", "compare_set", "set"})


class Publication(Gate):
    """A call that sets or counts up a key.

    `stamp` is what its rank knew, None before the call is replayed. `is_settled` is false for an
    ``add`` that has not returned yet; `number` is what it returned, None where that is no number.
    """

    __slots__ = ("call", "is_settled", "number", "stamp")

    def __init__(self, call: StoreCall) -> None:
        super().__init__()
        self.call = call
        self.number: int | None = None
        self.is_settled = call.action != "add"
        self.stamp: Stamp | None = None

    @property
    def rank(self) -> int:
        """Whose call it is."""
        return self.call.rank

    @property
    def time_ns(self) -> int:
        """When it was made."""
        return self.call.time_ns


S = TypeVar("S", "Publication", TimedAccess)


class LostSources(Generic[S]):
    """What others may come after that was forgotten, as the last one of each rank.

    That one follows those before it: an edge too many hides a race, one too few accuses.
    """

    def __init__(self) -> None:
        self._keys = Filter()
        self._latest: dict[int, S] = {}

    def add(self, key: Hashable, sources: Iterable[S]) -> None:
        """Forget what was known under a key."""
        self._keys.add(key)
        for source in sources:
            known = self._latest.get(source.rank)
            if known is None or known.time_ns <= source.time_ns:
                self._latest[source.rank] = source

    def of(self, key: Hashable) -> Iterable[S]:
        """Return what stands for all that was forgotten, if it may have been under this key."""
        return self._latest.values() if key in self._keys else ()


def _is_known(source: Publication | TimedAccess, known: Mapping[int, int]) -> bool:
    """Whether all ranks know that something has happened, and all that its rank knew then."""
    stamp = source.stamp
    if stamp is None or not source.is_settled or stamp.num_events > known[source.rank]:
        return False
    return all(number <= known[rank] for rank, number in stamp.known.items())


class StoreEdges:
    """What was published under each key of each store, as far as records of it have come."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[tuple[str, str], deque[Publication]] = OrderedDict()
        self._lost: LostSources[Publication] = LostSources()
        self.size = 0
        self._unsettled: dict[tuple[str, str, int], Publication] = {}

    def announce(self, call: StoreCall) -> Publication:
        """Take in a call that has not returned, as its record comes."""
        publication = Publication(call)
        if call.action in _PUBLISHING:
            for key in call.keys:
                self._of(call.store, key).append(publication)
                if call.action == "add":
                    self._unsettled[call.store, key, call.rank] = publication
        return publication

    def settle(self, call: StoreCall) -> Iterator[Publication]:
        """Take in a call that has returned; yield those of its rank whose number it tells."""
        if call.action != "add":
            return
        for key in call.keys:
            publication = self._unsettled.pop((call.store, key, call.rank), None)
            if publication is not None:
                publication.number = _number(call.value)
                publication.is_settled = True
                yield publication

    def _of(self, store: str, key: str) -> deque[Publication]:
        self.size += 1
        return self._by_key.setdefault((store, key), deque(maxlen=_MOST_PER_KEY))

    def compact(self, known: Mapping[int, int]) -> bool:
        """Drop what all ranks know of; return whether more had to go."""
        for key, published in tuple(self._by_key.items()):
            while published and _is_known(published[0], known):
                published.popleft()
            if not published:
                del self._by_key[key]
        self.size = sum(map(len, self._by_key.values()))
        is_full = self.size > _MOST_PUBLISHED
        while self.size > _MOST_PUBLISHED // 2 and is_full:
            key, published = self._by_key.popitem(last=False)
            self.size -= len(published)
            self._lost.add(key, published)
        return is_full

    def sources(self, call: StoreCall) -> Iterator[Publication]:
        """Yield what this call, which has ended, comes after, as far as it has come.

        Where the value does not tell, all that was published before by the clock counts.
        """
        for key in call.keys:
            earlier = [
                each
                for each in (
                    *self._lost.of((call.store, key)),
                    *self._by_key.get((call.store, key), ()),
                )
                if each.call.rank != call.rank and each.time_ns <= call.time_ns
            ]
            if call.action == "add":
                number = _number(call.value)
                yield from (each for each in earlier if not _is_later(each, number))
            else:
                read = [each for each in earlier if call.value and each.call.value == call.value]
                yield from read or earlier


def _is_later(publication: Publication, number: int | None) -> bool:
    theirs = publication.number
    return number is not None and theirs is not None and theirs > number


def _number(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


# How far the events of one rank are replayed, and what the rank knows of the others there.

RECENT_SYNCS: Final = 64
MOST_CALLS: Final = 1024
"""So many calls whose end is not known are followed; older ones count as waited for."""
_MOST_TRIED: Final = 10_000
_SHOWN_CALLS: Final = 16


class OpenCall(NamedTuple):
    """A call of a rank whose end it has not observed; it then has heard of `senders`."""

    call: Collective
    meeting: Meeting
    senders: Senders


class SyncHistory:
    """The last calls in which a rank and others waited for one another, numbered from 1."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, int, SyncPoint]] = deque(maxlen=RECENT_SYNCS)

    def add(self, meeting: Meeting, point: SyncPoint) -> None:
        """Remember the next one."""
        self.count += 1
        self._recent.append((self.count, meeting.number, point))

    def until(self, count: int) -> Iterator[tuple[int, SyncPoint]]:
        """Yield the numbers of the meetings and the calls up to this one, latest first."""
        for number, meeting, point in reversed(self._recent):
            if number <= count:
                yield meeting, point


class Replay:
    """One rank in the replay of all.

    `queue` holds what could not be replayed yet, since its first item waits at `gate`. `soft` are
    calls that are over when the rank goes on, whoever waited for them; `held` those that somebody
    must be seen to wait for; `streamed` those that only the device has waited for. `fed_ns` is the
    time of the last event that came, `sure_ns` the one at the last poll. `has_group`: it has
    created a process group.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.host = ""
        self.queue: deque[Event | TimedAccess | Publication] = deque()
        self.gate: Gate | None = None
        self.known: Clock = NOTHING
        self.count = 0
        self.num_done = 0
        self.fed_ns = self.sure_ns = 0
        self.has_left = self.is_incomplete = self.syncs_host = self.has_group = False
        self.soft: dict[int, OpenCall] = {}
        self.held: dict[int, OpenCall] = {}
        self.streamed: dict[int, OpenCall] = {}
        self.open: dict[int, TimedAccess] = {}
        self.history = SyncHistory()
        self.last_sync: SyncPoint | None = None
        self.creation: Meeting | None = None
        self.last_access: TimedAccess | None = None
        self._failed: dict[tuple[str, int], CallSite] = {}
        self._listed: dict[tuple[str, int], CallSite] = {}
        self._listed_after = 0
        self._stamp = Stamp(NOTHING, rank, 0)

    @property
    def is_gone(self) -> bool:
        """Nothing that others could wait for will come from this rank any more."""
        return (self.has_left or self.is_incomplete) and not self.queue

    @property
    def stamp(self) -> Stamp:
        """What others learn who wait for the rank now."""
        stamp = self._stamp
        if stamp.known is not self.known or stamp.num_events != self.count:
            stamp = self._stamp = Stamp(self.known, self.rank, self.count)
        return stamp

    def calls_with(self, call: int) -> dict[int, OpenCall] | None:
        """Return the calls among which the one with this event number is open."""
        if call in self.soft:
            return self.soft
        if call in self.held:
            return self.held
        return self.streamed if call in self.streamed else None

    def next_ns(self) -> int | None:
        """Return the time of the event behind the one that is replayed now, if it has come."""
        return self.queue[1].time_ns if len(self.queue) > 1 else None

    def failure_of(self, access: TimedAccess) -> FileClosed | None:
        """Return that an access, which is replayed now, failed at once, if it is known by now."""
        following = self.queue[1] if len(self.queue) > 1 else None
        if isinstance(following, FileClosed) and following.access == access.event.seq:
            return following if following.error else None
        return None

    def note_failure(self, access: TimedAccess) -> None:
        """Remember that an access failed."""
        if len(self._failed) >= _MOST_TRIED:
            self._failed.clear()
        self._failed[access.event.path, id(access.event.site)] = access.event.site

    def has_failed(self, access: TimedAccess) -> bool:
        """Whether the same has failed before, at the same place of the program."""
        return (access.event.path, id(access.event.site)) in self._failed

    def polls_folder(self, access: TimedAccess) -> bool:
        """Whether the rank lists a folder again at one place, and has waited for nobody since."""
        event = access.event
        if event.action is not FileAction.LIST:
            return False
        if self.history.count != self._listed_after:
            self._listed, self._listed_after = {}, self.history.count
        listing = (event.path, id(event.site))
        if len(self._listed) >= _MOST_TRIED:
            self._listed.clear()
        is_again = listing in self._listed
        self._listed[listing] = event.site
        return is_again

    def unwaited(self) -> tuple[Collective, ...]:
        """Return the last calls whose end the rank has not observed."""
        if not (self.held or self.streamed):
            return ()
        calls = [each.call for each in (*self.streamed.values(), *self.held.values())]
        return tuple(sorted(calls, key=lambda call: call.seq)[-_SHOWN_CALLS:])


# Order by files: a rank that saw one appear or vanish comes after it, and locks exclude.

_MOST_LOCKS: Final = 10_000
_MOST_LOGGED: Final = 20_000
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
    """Where paths came from, went to and were unlocked, as far as records of it have come."""

    def __init__(self) -> None:
        self._locks: SinceFirst[str, bool] = SinceFirst(_MOST_LOCKS)
        self._appeared: _Log = OrderedDict()
        self._appeared_in: _Log = OrderedDict()
        self._vanished: _Log = OrderedDict()
        self._unlocked: _Log = OrderedDict()
        self._taken: SinceFirst[str, set[int]] = SinceFirst(_MOST_LOCKS)
        self._lost: LostSources[TimedAccess] = LostSources()
        self.size = 0

    def announce(self, access: TimedAccess) -> None:
        """Take in an access as its record comes."""
        event = access.event
        action, path = event.action, event.path
        if action in _APPEARING:
            self._add(self._appeared, path, access)
            self._add(self._appeared_in, path.rpartition("/")[0], access)
        if action in _VANISHING:
            self._add(self._vanished, path, access)
        if action is FileAction.RENAME:
            self._add(self._vanished, event.origin, access)
        if action is FileAction.UNLOCK:
            self._add(self._unlocked, path, access)
        was_taken = event.rank in self._taken.get(path, ()) or self._taken.has_lost(path)
        if action in _LOCKING or (action in _VANISHING and was_taken):
            self._locks.of(path, lambda: True)
        if event.is_exclusive:
            self._taken.of(path, set).add(event.rank)

    def is_lock(self, path: str) -> bool:
        """Whether a file serves as a lock, by ``flock`` or by being there, or did once."""
        return path in self._locks or self._locks.has_lost(path)

    def _add(self, log: _Log, path: str, access: TimedAccess) -> None:
        by_rank = log.setdefault(path, {})
        by_rank.setdefault(access.rank, deque(maxlen=_MOST_PER_RANK)).append(access)
        log.move_to_end(path)
        self.size += 1

    def compact(self, known: Mapping[int, int]) -> bool:
        """Drop what all ranks know of; return whether more had to go."""
        logs = (self._appeared, self._appeared_in, self._vanished, self._unlocked)
        for log in logs:
            for path, by_rank in tuple(log.items()):
                _drop_known(by_rank, known)
                if not by_rank:
                    del log[path]
        self.size = sum(len(each) for log in logs for of in log.values() for each in of.values())
        if self.size <= _MOST_LOGGED:
            return False
        for log in logs:
            for path in [*islice(log, len(log) // 2)]:
                accesses = [access for each in log[path].values() for access in each]
                # Who waits for one that is not replayed could wait for ever.
                if all(access.stamp is not None for access in accesses):
                    del log[path]
                    self.size -= len(accesses)
                    self._lost.add(path, accesses)
        return True

    def _of(self, log: _Log, path: str) -> dict[int, deque[TimedAccess]]:
        """Return the accesses by rank, those first that stand for what was forgotten."""
        found = log.get(path, {})
        lost = {each.rank: each for each in self._lost.of(path)}
        if not lost:
            return found
        return {
            rank: deque([*([lost[rank]] if rank in lost else []), *found.get(rank, ())])
            for rank in {*lost, *found}
        }

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
            yield from _until(self._of(self._unlocked, event.path), access, deadline_ns)
        if event.action is FileAction.LIST:
            yield from _until(self._of(self._appeared_in, event.path), access, deadline_ns)
        if event.is_exclusive or (event.action is FileAction.TEST and not event.found):
            for path in (event.path, *parents(event.path)):
                yield from _until(self._of(self._vanished, path), access, deadline_ns)
        if event.action in _TRYING or (
            event.action is FileAction.TEST and event.found is not False
        ):
            yield from _until(self._of(self._appeared, event.path), access, deadline_ns)
            for path in parents(event.path):
                for source in _until(self._of(self._appeared, path), access, deadline_ns):
                    # A folder that was renamed brought all its files along.
                    if source.event.action is FileAction.RENAME:
                        yield source


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, innermost first, without the root."""
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def _drop_known(by_rank: dict[int, deque[TimedAccess]], known: Mapping[int, int]) -> None:
    for rank, accesses in tuple(by_rank.items()):
        while accesses and _is_known(accesses[0], known):
            accesses.popleft()
        if not accesses:
            del by_rank[rank]


def _until(
    by_rank: Mapping[int, deque[TimedAccess]], access: TimedAccess, deadline_ns: int
) -> Iterable[TimedAccess]:
    """Yield the last one of each rank that came in time: it follows those before it."""
    for accesses in by_rank.values():
        for earlier in reversed(accesses):
            if earlier.time_ns < deadline_ns:
                if access.may_meet(earlier):
                    yield earlier
                break


# The replay: whose event comes next.

NEVER: Final = 1 << 63
IDLE_NS: Final = 30_000_000_000
"""From a rank of which nothing came for so long nothing earlier will come."""
MOST_QUEUED: Final = 150_000
"""So many events may wait: they take some 100 MiB."""

Step = Callable[[Replay, Any], Gate | None]
"""Replays one event of a rank, or returns what it has to wait for first."""


class Schedule:
    """The replays of all ranks.

    `horizon_ns` is the time up to which everything has come; who needs it to be later waits at
    `horizon`. Who needs the next event of its own rank waits at `own_next`. `is_ending` says that
    nothing more comes; `is_over` that besides all waits that are left are in vain.

    `woken` are the ranks that should look again; `has_absent` says that some cannot come any more.
    `doubted_ns` is the time from which on an order may have been missed. `problem` says why
    nothing is replayed any more.
    """

    def __init__(self, world: RankSet) -> None:
        self.replays = {rank: Replay(rank) for rank in world}
        self.horizon_ns = -1
        self.horizon, self.own_next = Gate(), Gate()
        self.is_ending = self.is_over = self.has_absent = False
        self.doubted_ns = NEVER
        self.problem = ""
        self._doubted_files: dict[int, int] = {}
        self.woken: deque[int] = deque()
        self._num_queued = 0

    # The replay

    def take(self, replay: Replay, event: Event, step: Step) -> bool:
        """Replay an event at once if nothing before it waits; return whether that was possible."""
        if replay.gate is not None:
            return False
        gate = step(replay, event)
        if gate is None:
            replay.num_done += 1
        else:
            replay.queue.append(event)
            self._num_queued += 1
            replay.gate = gate
            gate.waiters.append(replay.rank)
        return True

    def enqueue(
        self,
        replay: Replay,
        item: Event | TimedAccess | Publication,
        steps: Mapping[type, Step],
    ) -> None:
        """Take in what is to be replayed for a rank, and replay what can be."""
        if self.problem:
            return
        replay.queue.append(item)
        self._num_queued += 1
        if replay.gate is None or replay.gate is self.own_next:
            self.woken.append(replay.rank)
        if self.woken:
            self.go_on(steps)
        if self._num_queued > MOST_QUEUED:
            self._give_up()

    def go_on(self, steps: Mapping[type, Step]) -> None:
        """Replay all that can be."""
        while self.woken:
            replay = self.replays[self.woken.popleft()]
            was_waiting = replay.gate is not None
            replay.gate = None
            self._replay(replay, steps)
            if was_waiting and replay.is_gone:
                self.reconsider()

    def _replay(self, replay: Replay, steps: Mapping[type, Step]) -> None:
        queue = replay.queue
        while queue:
            item = queue[0]
            gate = steps[type(item)](replay, item)
            if gate is not None:
                replay.gate = gate
                if gate is not self.own_next:
                    gate.waiters.append(replay.rank)
                return
            queue.popleft()
            replay.num_done += 1
            self._num_queued -= 1

    def wake(self, gate: Gate) -> None:
        """Let those look again who wait at this gate."""
        if gate.waiters:
            self.woken += gate.waiters
            gate.waiters = []

    def reconsider(self) -> None:
        """Let all who wait look again whether they still have to."""
        self.woken += [rank for rank, replay in self.replays.items() if replay.gate is not None]

    def _give_up(self) -> None:
        silent = RankSet(rank for rank, replay in self.replays.items() if not replay.queue)
        self.problem = (
            "the order of accesses to files could not be followed: too many events wait for "
            f"records of {silent.phrase()}"
        )
        for replay in self.replays.values():
            replay.queue.clear()

    # Time

    def advance(self, now_ns: int, unseen: Collection[int]) -> None:
        """Let time pass; nothing can be heard now of the ranks in `unseen`."""
        heard_ns = [
            replay.fed_ns if rank in unseen else max(replay.fed_ns, now_ns - IDLE_NS)
            for rank, replay in self.replays.items()
            if not replay.has_left
        ]
        self.horizon_ns = max(self.horizon_ns, min(heard_ns, default=NEVER))
        for replay in self.replays.values():
            replay.sure_ns = replay.fed_ns
        self.wake(self.horizon)

    def end(self, steps: Mapping[type, Step]) -> None:
        """Nothing more comes: replay what waits in vain as if it had been satisfied."""
        self.horizon_ns, self.is_ending = NEVER, True
        self.reconsider()
        self.go_on(steps)
        self.is_over = self.has_absent = True
        self.reconsider()
        self.go_on(steps)

    def may_go_on(self, awaited: Iterable[int], time_ns: int) -> bool:
        """Whether these ranks cannot come any more; if so, what is ordered from now on is not sure.

        `time_ns` is when the wait began.
        """
        if not (self.is_over or all(self.replays[rank].is_gone for rank in awaited)):
            return False
        self.doubt(time_ns)
        return True

    def known_to_all(self) -> dict[int, int]:
        """Return for each rank how many of its events on files all others know to be over.

        Those that have come to their end, and all of whose events are replayed, do nothing more.
        """
        here = [replay for replay in self.replays.values() if not replay.has_left or replay.queue]
        return {
            rank: min(
                (each.known.get(rank, 0) for each in here if each.rank != rank), default=NEVER
            )
            for rank in self.replays
        }

    def leave(self, replay: Replay) -> None:
        """Note that a rank has come to its end."""
        replay.has_left = self.has_absent = True
        self.reconsider()

    # Doubt

    def doubt(self, since_ns: int) -> None:
        """From this time on, do not believe that accesses are not ordered."""
        self.doubted_ns = min(self.doubted_ns, since_ns)

    def doubt_rank(self, replay: Replay, since_ns: int, *, is_order: bool) -> None:
        """Note that not all accesses of a rank are recorded any more, or not all its waits.

        That was noticed at `since_ns`. It may have begun after the last poll before that.
        """
        since_ns = min(since_ns, replay.sure_ns)
        if is_order:
            replay.is_incomplete = self.has_absent = True
            self.doubt(since_ns)
            self.reconsider()
        before_ns = self._doubted_files.get(replay.rank, NEVER)
        self._doubted_files[replay.rank] = min(before_ns, since_ns)

    def is_doubtful(self, *accesses: TimedAccess) -> bool:
        """Whether these may be ordered in a way that was not seen."""
        last_ns = max(access.time_ns for access in accesses)
        since_ns = [self._doubted_files.get(access.rank, NEVER) for access in accesses]
        return last_ns >= min(self.doubted_ns, *since_ns)
