"""Accesses to files that can harm one another, side by side."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.files import FileAccess, FileClosed
from distdiag.events.lifecycle import Raised
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.rank_states import RankState


class Conflict(StrEnum):
    """What can go wrong between two accesses that nothing orders."""

    READ_OF_WRITE = "read-of-write"  # a file is read while another rank writes it
    TWO_WRITES = "two-writes"  # two ranks write, or replace, one file
    USE_OF_REMOVED = "use-of-removed"  # removed or renamed away while another rank uses it
    LIST_OF_CHANGED = "list-of-changed"  # a folder is listed while another rank changes it


SyncPoint = Collective | GroupCreated


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a rank, and what this rank had waited for before it.

    `closed` is its end, None while it is open. `last_sync` is the last call before it in which the
    rank waited for others. `unwaited` are asynchronous collectives that it had issued before and
    whose end it has not observed. `is_before_init`: the rank had not yet created its default
    process group. `is_followed`: a `LIST` after which the rank used an entry that another rank had
    changed.
    """

    event: FileAccess
    closed: FileClosed | None = None
    last_sync: SyncPoint | None = None
    unwaited: tuple[Collective, ...] = ()
    is_before_init: bool = False
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Race(View):
    """Accesses to the same files, from the same places of the program, that nothing orders.

    `changes` are those of the ranks that write, rename or remove, `uses` those of the ranks that
    need it otherwise, one of each rank; of two writes both hold all writers. `paths` are all files
    concerned, in the order in which they were met. `common_sync` is the last point before that a
    changing and a using rank have in common. `has_struck`: by the clock a use lies within a change.
    `raised` are the exceptions by which ranks ended in one of these accesses.
    """

    conflict: Conflict
    changes: Mapping[int, Access]
    uses: Mapping[int, Access]
    paths: tuple[str, ...]
    common_sync: SyncPoint | None = None
    has_struck: bool = False
    raised: Mapping[int, Raised] = field(default_factory=dict)
    states: Mapping[int, RankState] = field(default_factory=dict)
    key: Hashable = None

    @property
    def supersedes(self) -> Hashable:
        """What was said when the race was smaller."""
        return self.key

    @property
    def ranks(self) -> RankSet:
        """All ranks concerned."""
        return RankSet([*self.changes, *self.uses])


@dataclass(frozen=True, slots=True)
class MissingFile(View):
    """A rank ended because a file was not there, and no rank of its node had ever written it.

    `namesakes` are the last writes of files with the same name elsewhere, by rank; `siblings` those
    of other ranks in the same folder, under names that differ in numbers only. `written` is the
    path as the program gave it; `folders` are the last ones that these ranks made above their file.
    """

    rank: int
    path: str
    raised: Raised
    namesakes: Mapping[int, FileAccess]
    siblings: Mapping[int, FileAccess] = field(default_factory=dict)
    written: str = ""
    folders: Mapping[int, FileAccess] = field(default_factory=dict)
