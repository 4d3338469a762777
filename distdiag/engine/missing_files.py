"""Files that a rank needed and that were never there: who wrote one of that name elsewhere."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from pathlib import PurePosixPath
from typing import Final

from distdiag.alignment import MissingFile
from distdiag.event import FileAccess, FileAction, Raised

RECENT: Final = 64
MOST_NAMES: Final = 10_000

_MAKING: Final = frozenset(
    {FileAction.WRITE, FileAction.APPEND, FileAction.RENAME, FileAction.LINK}
)
_ABSENT: Final = ("FileNotFoundError", "No such file", "does not exist", "not found")
_QUOTED: Final = re.compile(r"""['"](/[^'"]+)['"]""")


class MissingFiles:
    """Remembers who wrote which file, and what each rank accessed last."""

    def __init__(self) -> None:
        """Know of no file."""
        self._made: dict[str, dict[int, FileAccess]] = defaultdict(dict)
        self._recent: dict[int, deque[FileAccess]] = defaultdict(lambda: deque(maxlen=RECENT))

    def add(self, access: FileAccess) -> None:
        """Take in an access of a rank."""
        if access.action in _MAKING:
            name = PurePosixPath(access.path).name
            if name in self._made or len(self._made) < MOST_NAMES:
                self._made[name][access.rank] = access
        else:
            self._recent[access.rank].append(access)

    def explain(self, raised: Raised) -> MissingFile | None:
        """Return the file for lack of which a rank ended, if others wrote one of that name."""
        if not any(sign in f"{raised.type}: {raised.message}" for sign in _ABSENT):
            return None
        path = self._path_of(raised)
        if path is None:
            return None
        made = self._made.get(PurePosixPath(path).name, {})
        if any(access.path == path for access in made.values()):
            return None  # it was written, sooner or later: a matter of order
        others = {rank: access for rank, access in made.items() if rank != raised.rank}
        return MissingFile(raised.rank, path, raised, others) if others else None

    def _path_of(self, raised: Raised) -> str | None:
        recent = self._recent[raised.rank]
        for access in reversed(recent):
            if access.path in raised.message or access.written in raised.message:
                return access.path
        quoted = _QUOTED.search(raised.message)
        return quoted[1] if quoted is not None else None
