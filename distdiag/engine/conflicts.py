"""Which accesses to paths can harm one another when nothing orders them."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final, NamedTuple

from distdiag.alignment import Conflict
from distdiag.event import FileAccess, FileAction


class Role(IntEnum):
    """What an access does to one path (a number, since its hash is taken very often)."""

    READ = auto()
    LIST = auto()
    WRITE = auto()  # its content is new afterwards, or begins to be
    APPEND = auto()
    TAKE = auto()  # it is gone afterwards, with all below it
    MAKE = auto()  # a folder is there that was not there before
    ENTER = auto()  # a folder is there, as it was before


class Harm(NamedTuple):
    """What can go wrong between two accesses, and which of them change something."""

    conflict: Conflict
    first_changes: bool
    second_changes: bool


CHANGING: Final = frozenset({Role.WRITE, Role.APPEND, Role.TAKE, Role.MAKE})
SEEN_IN_LISTS: Final = frozenset({Role.WRITE, Role.TAKE, Role.MAKE})

PREFERENCE: Final = (
    Conflict.READ_OF_WRITE,
    Conflict.TWO_WRITES,
    Conflict.USE_OF_REMOVED,
    Conflict.LIST_OF_CHANGED,
)
"""Where two accesses conflict in several ways, the first of these is told."""

_ROLES: Final = {
    FileAction.READ: Role.READ,
    FileAction.CONNECT: Role.READ,
    FileAction.WRITE: Role.WRITE,
    FileAction.RENAME: Role.WRITE,
    FileAction.LINK: Role.WRITE,
    FileAction.APPEND: Role.APPEND,
    FileAction.REMOVE: Role.TAKE,
    FileAction.REMOVE_TREE: Role.TAKE,
    FileAction.LIST: Role.LIST,
    FileAction.MAKE_DIR: Role.MAKE,
}

_UNEQUAL: Final[dict[tuple[Role, Role], Conflict]] = {
    (Role.WRITE, Role.READ): Conflict.READ_OF_WRITE,
    (Role.APPEND, Role.READ): Conflict.READ_OF_WRITE,
    (Role.MAKE, Role.LIST): Conflict.READ_OF_WRITE,
    (Role.WRITE, Role.APPEND): Conflict.TWO_WRITES,
    **{(Role.TAKE, role): Conflict.USE_OF_REMOVED for role in Role if role is not Role.TAKE},
}
_EQUAL: Final = {Role.WRITE: Conflict.TWO_WRITES, Role.TAKE: Conflict.USE_OF_REMOVED}


def roles_of(event: FileAccess, *, has_failed: bool) -> tuple[tuple[str, Role], ...]:
    """Return what an access does to which paths.

    A folder that could not be made was there already: `has_failed`.
    """
    role = _ROLES.get(event.action)
    if role is None:
        return ()
    if role is Role.MAKE and has_failed:
        role = Role.ENTER
    if event.action is FileAction.RENAME and event.origin:
        return ((event.path, role), (event.origin, Role.TAKE))
    return ((event.path, role),)


def reaches_below(event: FileAccess, role: Role) -> bool:
    """Whether what an access does to a path matters to all that lies below it."""
    return role in (Role.TAKE, Role.MAKE) or event.action is FileAction.RENAME


def _harm(first: Role, second: Role) -> Harm | None:
    if first is second:
        conflict = _EQUAL.get(first)
        return Harm(conflict, True, True) if conflict else None
    if (first, second) in _UNEQUAL:
        conflict = _UNEQUAL[first, second]
        return Harm(conflict, True, conflict is Conflict.TWO_WRITES)
    if (second, first) in _UNEQUAL:
        conflict = _UNEQUAL[second, first]
        return Harm(conflict, conflict is Conflict.TWO_WRITES, True)
    return None


AT_ONE_PATH: Final = {
    (first, second): harm
    for first in Role
    for second in Role
    if (harm := _harm(first, second)) is not None
}
"""What accesses to one path in these two roles do to one another."""


def below(top: Role) -> Conflict:
    """Return what an access that reaches below its path does to accesses there."""
    return Conflict.USE_OF_REMOVED if top is Role.TAKE else Conflict.READ_OF_WRITE
