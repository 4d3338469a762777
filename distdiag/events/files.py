"""What probes observe of files and of the key-value store of the job."""

from enum import StrEnum
from typing import Final

import msgspec

from distdiag.events.base import CallSite, Event, Frame


class FileAction(StrEnum):
    """What is done with a path."""

    READ = "read"
    WRITE = "write"  # the content is replaced or changed in place
    APPEND = "append"
    RENAME = "rename"  # `origin` vanishes, `path` is there at once with all its content
    LINK = "link"
    REMOVE = "remove"
    REMOVE_TREE = "remove-tree"
    MAKE_DIR = "make-dir"
    LIST = "list"
    TEST = "test"  # whether it exists, or how large or old it is
    CONNECT = "connect"  # to the socket at this path
    LOCK = "lock"
    UNLOCK = "unlock"


MAKING: Final = frozenset({FileAction.WRITE, FileAction.APPEND, FileAction.RENAME, FileAction.LINK})
"""After these there is a file at the path."""


class FileAccess(Event, frozen=True, kw_only=True):
    """An access to a path that other ranks may see, written before it happens.

    `path` is absolute, with the links of its folder resolved; `written` is what the program gave.
    `api` is what was called (``open``, ``torch.save``). `is_shared`: ranks of other nodes see the
    same file. `is_exclusive`: it is created, and that fails where it exists. `found` is the result
    of a `TEST`. `has_end`: a `FileClosed` will tell when it was over. `moved`: a digest of
    the small file that a `RENAME` puts in place.
    """

    action: FileAction
    path: str
    written: str
    site: CallSite
    api: str = "open"
    origin: str = ""
    is_shared: bool = False
    is_exclusive: bool = False
    found: bool | None = None
    has_end: bool = False
    moved: str | None = None
    thread: str = "MainThread"


class FileContent(msgspec.Struct, frozen=True, array_like=True):
    """What a small file held: its size in bytes and the checksums of its first blocks of 4 KiB."""

    size: int
    blocks: tuple[int, ...]


class FileClosed(Event, frozen=True, kw_only=True):
    """The access with event number `access` is over; `error` is what it raised, where known."""

    access: int
    error: str = ""
    content: FileContent | None = None


class StoreCall(Event, frozen=True, kw_only=True):
    """A call of the job's key-value store.

    Calls that publish (set, add, compare_set, delete) are written before, with `done` false; those
    that learn (get, wait, check, add, compare_set) after, with `done` true. `value` is a digest of
    what was set or read, or the number that ``add`` returned. `frames` are the innermost ones of
    the user's own code, in calls that publish.
    """

    action: str
    store: str
    keys: tuple[str, ...]
    value: str = ""
    done: bool = False
    frames: tuple[Frame, ...] = ()


class StoreAsked(Event, frozen=True, kw_only=True):
    """A rank begins to wait for keys of the job's store; a `StoreCall` tells that it has them.

    `frames` are the innermost ones of the user's own code.
    """

    action: str
    store: str
    keys: tuple[str, ...]
    frames: tuple[Frame, ...] = ()
    thread: str = "MainThread"


class HostSynced(Event, frozen=True, kw_only=True):
    """The device is done with the collectives that its streams had waited for before.

    The first one, ``start``, says that this is observed: what is waited for later may not be done.
    """

    api: str
