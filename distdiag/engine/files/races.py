"""Find accesses to files that can harm one another and that nothing orders."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.engine.bounded import SinceFirst
from distdiag.engine.files.conflicts import (
    AT_ONE_PATH,
    CHANGING,
    PREFERENCE,
    SEEN_IN_LISTS,
    Pair,
    RaceGroup,
    RaceKey,
    Role,
    TimedAccess,
    below,
    reaches_below,
    roles_of,
)
from distdiag.engine.files.happens_before import FORGOTTEN, HappensBefore
from distdiag.engine.files.order import parents
from distdiag.events.base import CallSite
from distdiag.events.files import FileAction
from distdiag.events.lifecycle import Raised
from distdiag.events.ranks import RankSet
from distdiag.views.files import Conflict, Race

# What ranks have found out about paths by themselves.

_MOST_PATHS: Final = 20_000


class KnownPaths:
    """Which ranks have made or tested which folders, and which files they have seen.

    What is forgotten they may have seen.
    """

    def __init__(self) -> None:
        self._by_path: SinceFirst[str, dict[int, int | None]] = SinceFirst(_MOST_PATHS)

    def note(self, access: TimedAccess) -> None:
        """Take in a test, or the making of a folder."""
        event = access.event
        if event.action is FileAction.MAKE_DIR:
            # Who makes a folder makes those above it as well, if they are not there.
            for path in (event.path, *parents(event.path)):
                self._by_path.of(path, dict).setdefault(access.rank, None)
        elif event.action is FileAction.TEST:
            ranks = self._by_path.of(event.path, dict)
            if event.found and ranks.get(access.rank) is None:
                ranks[access.rank] = access.order
            else:
                ranks.setdefault(access.rank, None)

    def has_looked(self, rank: int, path: str) -> bool:
        """Whether a rank has made this folder, or tested whether it is there."""
        return rank in self._by_path.get(path, ()) or self._by_path.has_lost(path)

    def was_seen_before(self, access: TimedAccess) -> bool:
        """Whether the rank had tested before that what it accesses is there."""
        path = access.event.path
        order = self._by_path.get(path, {}).get(access.rank)
        return self._by_path.has_lost(path) if order is None else order < access.order


# The last accesses to each path, of each rank from each place of the program.

MOST_ACCESSES: Final = 30_000
"""So many accesses are kept that some rank may still race with: they take some 100 MiB."""
_FEWEST_KEPT: Final = 4096
"""With fewer it is not worth looking which of them all ranks know of."""

_Key = tuple[int, str, Role, int, int]
Entry = tuple[TimedAccess, Role]


class PathState:
    """What is remembered of one path."""

    __slots__ = ("changes", "lists", "others")

    def __init__(self) -> None:
        self.changes: dict[_Key, Entry] = {}
        self.lists: dict[_Key, Entry] = {}
        self.others: dict[_Key, Entry] = {}

    def part(self, role: Role) -> dict[_Key, Entry]:
        """Return where accesses in this role are kept."""
        if role in CHANGING:
            return self.changes
        return self.lists if role is Role.LIST else self.others

    def all(self) -> Iterator[Entry]:
        """Yield all accesses with their roles."""
        yield from self.changes.values()
        yield from self.lists.values()
        yield from self.others.values()


class PathIndex:
    """All paths. Of what a rank did at one place only the last is kept, and what is still open.

    The last is enough: whoever comes after it comes after the others. `is_full`: old accesses
    were forgotten, those that changed nothing first.
    """

    def __init__(self, most_accesses: int = MOST_ACCESSES) -> None:
        self.is_full = False
        self._most = most_accesses
        self._states: dict[str, PathState] = {}
        self._children: dict[str, dict[str, None]] = {}
        self._deep: dict[str, dict[_Key, Entry]] = {}
        # By age, so that the oldest is found at once: a dict would look through those that went.
        self._reads: OrderedDict[tuple[str, _Key], Role] = OrderedDict()
        self._changes: OrderedDict[tuple[str, _Key], Role] = OrderedDict()

    def add(self, path: str, access: TimedAccess, role: Role) -> None:
        """Remember an access that begins."""
        state = self._states.get(path)
        if state is None:
            state = self._states[path] = PathState()
            self._hang_below(path)
        key = _key(access, role)
        state.part(role)[key] = (access, role)
        ages = self._changes if role in CHANGING else self._reads
        ages[path, key] = role
        ages.move_to_end((path, key))
        if reaches_below(access.event, role):
            self._deep.setdefault(path, {})[key] = (access, role)
        if len(self._reads) + len(self._changes) > self._most:
            self.is_full = True
            oldest = self._reads or self._changes
            oldest_path, oldest_key = next(iter(oldest))
            self._forget(oldest_path, oldest_key, oldest[oldest_path, oldest_key])

    @property
    def size(self) -> int:
        """How many accesses are remembered."""
        return len(self._reads) + len(self._changes)

    def compact(self, known: Mapping[int, int]) -> None:
        """Drop the paths to which all accesses are known to all ranks: nobody races with them."""
        for path, state in tuple(self._states.items()):
            entries = tuple(state.all())
            if all(each.end is not None and each.end <= known[each.rank] for each, _ in entries):
                for access, role in entries:
                    self._forget(path, _key(access, role), role)

    def close(self, path: str, access: TimedAccess, role: Role) -> None:
        """Let an access that is over take the place of the one before it."""
        self.remove(path, access, role, is_open=True)
        self.add(path, access, role)

    def remove(self, path: str, access: TimedAccess, role: Role, *, is_open: bool) -> None:
        """Forget an access."""
        self._forget(path, _key(access, role, is_open=is_open), role)

    def _forget(self, path: str, key: _Key, role: Role) -> None:
        ages = self._changes if role in CHANGING else self._reads
        if ages.pop((path, key), None) is None:
            return
        state = self._states[path]
        del state.part(role)[key]
        deep = self._deep.get(path, {})
        if deep.pop(key, None) is not None and not deep:
            del self._deep[path]
        if not (state.changes or state.lists or state.others):
            del self._states[path]
            self._unhang(path)

    def _hang_below(self, path: str) -> None:
        for folder in parents(path):
            children = self._children.setdefault(folder, {})
            if path in children:
                return
            children[path] = None
            path = folder

    def _unhang(self, path: str) -> None:
        for folder in parents(path):
            if path in self._children or path in self._states:
                return
            children = self._children[folder]
            del children[path]
            if children:
                return
            del self._children[folder]
            path = folder

    def at(self, path: str) -> PathState | None:
        """Return what is remembered of a path."""
        return self._states.get(path)

    def children(self, folder: str) -> Iterator[tuple[str, PathState]]:
        """Yield the direct entries of a folder, and what is remembered of them."""
        for path in self._children.get(folder, ()):
            if path in self._states:
                yield path, self._states[path]

    def below(self, folder: str) -> Iterator[tuple[str, PathState]]:
        """Yield all that lies below a folder, and what is remembered of it."""
        pending = list(self._children.get(folder, ()))
        while pending:
            path = pending.pop()
            pending += self._children.get(path, ())
            if path in self._states:
                yield path, self._states[path]

    def reaching(self, path: str) -> Iterator[Entry]:
        """Yield the accesses to folders above a path that matter to it."""
        if self._deep:
            for folder in parents(path):
                yield from self._deep.get(folder, {}).values()


def _key(access: TimedAccess, role: Role, *, is_open: bool | None = None) -> _Key:
    event = access.event
    if is_open is None:
        is_open = access.end is None
    number = event.seq if is_open else -1
    return (event.rank, event.action, role, id(event.site), number)


# Finds the races.

MOST_RACES: Final = 1000
_MOST_LISTINGS: Final = 10_000
_MOST_PAIRS: Final = 4096
_AT_ONCE: Final = frozenset({FileAction.RENAME, FileAction.LINK})
_MANY: Final = 1000
_MOST_REPEATS: Final = 32
"""So many accesses of one place are found to race again before the rest of them is left alone."""


class FileRaces:
    """The races of a run: `order` is fed with events, and `changed` tells what is new."""

    def __init__(self, world: RankSet) -> None:
        self._order = HappensBefore(world, self)
        self._index = PathIndex()
        self._found: list[Pair] = []
        self._groups: dict[RaceKey, RaceGroup] = {}
        self._by_sites: dict[tuple[Conflict, int, int], tuple[RaceGroup, CallSite, CallSite]] = {}
        self._of_access: dict[tuple[int, int], dict[RaceGroup, None]] = {}
        self._known = KnownPaths()
        self._listings: dict[tuple[int, str], TimedAccess] = {}
        self._raised: dict[int, Raised] = {}
        self._repeats: Counter[int] = Counter()
        self._enough = _MANY
        self._is_over = False
        self._most_kept = _FEWEST_KEPT

    @property
    def order(self) -> HappensBefore:
        """The order of what the ranks did."""
        return self._order

    @property
    def problem(self) -> str:
        """Why not all accesses were compared, or an empty string."""
        if self._order.problem:
            return self._order.problem
        return FORGOTTEN if self._index.is_full else ""

    def note_end(self, raised: Raised) -> None:
        """Take in the exception by which a rank ended."""
        self._raised.setdefault(raised.rank, raised)
        for group in self._groups.values():
            if any(access.rank == raised.rank for access in group.accesses):
                group.has_news = True

    def finish(self) -> None:
        """Nothing more comes."""
        self._order.end()
        self._is_over = True

    def changed(self) -> Iterator[tuple[RaceKey, Race]]:
        """Yield the races that are new or have grown since they were last asked for."""
        self._sort_in()
        for key, group in self._groups.items():
            group.look(is_over=self._is_over)
            if group.has_news:
                group.has_news = False
                yield key, group.race(self._raised)

    def _sort_in(self) -> None:
        found, self._found = self._found, []
        for pair in found:
            ends = (pair.change, pair.use)
            if self._order.is_lock(pair.path) or not self._order.is_sure(*ends):
                continue
            if any(access.is_void for access in ends) or self._is_known_folder(pair):
                continue
            if not all(self._order.has_gone_on(access) for access in ends):
                self._found.append(pair)
                continue
            group = self._group(pair)
            if group is None:
                if len(self._groups) >= MOST_RACES:
                    continue
                group = RaceGroup(pair.conflict, self._order.common_sync(pair.use, pair.change))
                self._groups[pair.key] = group
            group.add(pair)
            for access in ends:
                if access.end is None:
                    self._of_access.setdefault((access.rank, access.event.seq), {})[group] = None

    # What the replay tells

    def begin(self, access: TimedAccess) -> None:
        """Compare an access with all that is not ordered with it and was replayed before."""
        self._known.note(access)
        has_failed = access.closed is not None and bool(access.closed.error)
        access.roles = roles_of(access.event, has_failed=has_failed)
        pairs: dict[TimedAccess, Pair] = {}
        self._repeats.clear()
        for path, role in access.roles:
            for pair in self._conflicts(access, path, role):
                other = pair.use if pair.change is access else pair.change
                if self._is_known(pair):
                    self._repeats[id(other.event.site)] += 1
                elif other not in pairs or _rank_of(pair) < _rank_of(pairs[other]):
                    pairs[other] = pair
        self._found += pairs.values()
        if len(self._found) >= self._enough:
            self._sort_in()
            self._enough = _MANY + 2 * len(self._found)
        for path, role in access.roles:
            self._index.add(path, access, role)
            self._follow(access, path, role)
        if self._index.size + len(self._listings) + self._order.size > self._most_kept:
            self._compact()

    def _compact(self) -> None:
        """Drop what all ranks know of: it is before all that comes now."""
        known = self._order.compact()
        self._index.compact(known)
        for key, listing in tuple(self._listings.items()):
            if listing.end is not None and listing.end <= known[listing.rank]:
                del self._listings[key]
        kept = self._index.size + len(self._listings) + self._order.size
        self._most_kept = max(_FEWEST_KEPT, 2 * kept)

    def end(self, access: TimedAccess) -> None:
        """Let an access be over: what comes after its end is ordered with it."""
        for path, role in access.roles:
            if access.is_void:
                self._index.remove(path, access, role, is_open=access.event.has_end)
            else:
                self._index.close(path, access, role)
        for group in self._of_access.pop((access.rank, access.event.seq), ()):
            group.has_news = True

    def _is_known(self, pair: Pair) -> bool:
        group = self._group(pair)
        return group is not None and group.holds(pair)

    def _group(self, pair: Pair) -> RaceGroup | None:
        change, use = pair.change.event.site, pair.use.event.site
        known = self._by_sites.get((pair.conflict, id(change), id(use)))
        if known is not None:
            return known[0]
        group = self._groups.get(pair.key)
        if group is not None:
            # The sites are kept, so that their ids stay their own.
            if len(self._by_sites) >= _MOST_PAIRS:
                self._by_sites.clear()
            self._by_sites[pair.conflict, id(change), id(use)] = (group, change, use)
        return group

    # Conflicts

    def _conflicts(self, access: TimedAccess, path: str, role: Role) -> Iterator[Pair]:
        yield from self._at_one_path(access, path, role)
        yield from self._in_lists(access, path, role)
        yield from self._above_and_below(access, path, role)

    def _at_one_path(self, access: TimedAccess, path: str, role: Role) -> Iterator[Pair]:
        state = self._index.at(path)
        if state is None:
            return
        for other, other_role in state.all() if role in CHANGING else state.changes.values():
            harm = AT_ONE_PATH.get((role, other_role))
            if harm is None or not _unordered(access, other):
                continue
            if self._repeats and self._repeats[id(other.event.site)] >= _MOST_REPEATS:
                continue
            if access.event.is_exclusive and other.event.is_exclusive:
                continue  # only one of them came to pass
            change, use = (access, other) if harm.first_changes else (other, access)
            if harm.conflict is Conflict.READ_OF_WRITE and self._is_whole(use, change, state):
                continue
            is_mutual = harm.first_changes and harm.second_changes
            yield Pair(harm.conflict, change, use, path, is_mutual)

    def _is_whole(self, use: TimedAccess, change: TimedAccess, state: PathState) -> bool:
        """Whether a rank knows that a file is there, which another one replaces at once.

        It reads the old one or the new one. Where it has put the old one there itself, whose it is
        remains a matter between the two that replace it.
        """
        return change.event.action in _AT_ONCE and (
            self._known.was_seen_before(use)
            or any(
                own.rank == use.rank
                and role is Role.WRITE
                and own.event.action in _AT_ONCE
                and own.order < use.order
                and not change.comes_after(own)
                for own, role in state.changes.values()
            )
        )

    def _in_lists(self, access: TimedAccess, path: str, role: Role) -> Iterator[Pair]:
        if role in SEEN_IN_LISTS:
            listed = self._index.at(path.rpartition("/")[0])
            for other, _ in listed.lists.values() if listed is not None else ():
                if _unordered(access, other):
                    self._note_use_of(other, path)
                    yield Pair(Conflict.LIST_OF_CHANGED, access, other, path, is_mutual=False)
        if role is Role.LIST:
            for entry, state in self._index.children(path):
                for other, other_role in state.changes.values():
                    if other_role in SEEN_IN_LISTS and _unordered(access, other):
                        yield Pair(Conflict.LIST_OF_CHANGED, other, access, entry, is_mutual=False)

    def _above_and_below(self, access: TimedAccess, path: str, role: Role) -> Iterator[Pair]:
        for other, top in self._index.reaching(path):
            if _unordered(access, other):
                yield Pair(below(top), other, access, path, is_mutual=False)
        if reaches_below(access.event, role):
            for entry, state in self._index.below(path):
                for other, _ in state.all():
                    if _unordered(access, other):
                        yield Pair(below(role), access, other, entry, is_mutual=False)

    # What ranks know of folders

    def _is_known_folder(self, pair: Pair) -> bool:
        """Whether a folder was made that the other rank has made, or tested, by itself."""
        folder = pair.change.event
        if folder.action is not FileAction.MAKE_DIR or pair.conflict is Conflict.LIST_OF_CHANGED:
            return False
        return self._known.has_looked(pair.use.rank, folder.path)

    def _follow(self, access: TimedAccess, path: str, role: Role) -> None:
        """Note that a rank uses an entry of a folder which it has listed before."""
        if role is Role.LIST:
            if len(self._listings) < _MOST_LISTINGS:
                self._listings[access.rank, path] = access
            return
        child = path
        for folder in parents(path) if self._listings else ():
            listing = self._listings.get((access.rank, folder))
            is_use = listing is not None and _is_of_one_turn(listing, access)
            if listing is not None and is_use and self._is_changed(listing, child):
                self._set_followed(listing)
            child = folder

    def _is_changed(self, listing: TimedAccess, path: str) -> bool:
        state = self._index.at(path)
        return state is not None and any(
            _unordered(listing, other) for other, _ in state.changes.values()
        )

    def _note_use_of(self, listing: TimedAccess, path: str) -> None:
        """Note that an entry which changes has been used by the rank that had listed the folder."""
        states = [self._index.at(path), *(state for _, state in self._index.below(path))]
        if any(
            other.rank == listing.rank and _is_of_one_turn(listing, other)
            for state in states
            if state is not None
            for other, role in state.all()
            if role is not Role.LIST
        ):
            self._set_followed(listing)

    def _set_followed(self, listing: TimedAccess) -> None:
        if listing.is_followed:
            return
        listing.is_followed = True
        for group in self._groups.values():
            group.has_news = group.has_news or group.conflict is Conflict.LIST_OF_CHANGED


def _is_of_one_turn(listing: TimedAccess, use: TimedAccess) -> bool:
    """Whether a rank used something after a listing, and had waited for nobody between the two."""
    return use.order > listing.order and use.num_syncs == listing.num_syncs


def _unordered(access: TimedAccess, earlier: TimedAccess) -> bool:
    """Whether nothing orders an access with one that was replayed before it."""
    return access.may_meet(earlier) and not access.comes_after(earlier)


def _rank_of(pair: Pair) -> int:
    return PREFERENCE.index(pair.conflict)
