"""An access to a file on its way into the event file."""

from __future__ import annotations

from collections.abc import Hashable
from types import FrameType
from typing import Final, NamedTuple

from distdiag.event import FileAction, Frame
from distdiag.probes.file_paths import Place
from distdiag.probes.file_sites import Stack

RELEASES: Final = frozenset(
    {
        FileAction.WRITE,
        FileAction.APPEND,
        FileAction.RENAME,
        FileAction.LINK,
        FileAction.REMOVE,
        FileAction.REMOVE_TREE,
        FileAction.MAKE_DIR,
        FileAction.UNLOCK,
    }
)
"""What another rank can notice: for both of them, all that this rank did came before it."""

MOVES: Final = frozenset(
    {FileAction.RENAME, FileAction.LINK, FileAction.REMOVE, FileAction.REMOVE_TREE}
)


class Attempt(NamedTuple):
    """What is done with a path, as the program wrote it, and by which function.

    The rest is as in `FileAccess`; `state` is what else makes it another attempt, such as the time
    when a folder changed. Questions are no attempts: they have been answered when they are known.
    """

    action: FileAction
    path: str
    api: str
    origin: str = ""
    is_exclusive: bool = False
    has_end: bool = False
    state: Hashable = None


Key = tuple[Attempt, Stack]


class Access:
    """An attempt that is worth a record.

    `seq` is its event number. While that is None it waits for its success, and `frame` says where
    it is made; afterwards `frames` do.
    """

    __slots__ = ("frame", "frames", "key", "moved", "origin", "place", "seq")

    def __init__(self, key: Key, place: Place, frame: FrameType) -> None:
        """Write nothing yet."""
        self.key = key
        self.place = place
        self.frame: FrameType | None = frame
        self.frames: tuple[Frame, ...] = ()
        self.origin = ""
        self.moved: str | None = None
        self.seq: int | None = None
