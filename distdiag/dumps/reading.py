"""The contract of a reader of foreign dumps, and the discovery of the readers.

Every module of this package may hold readers: classes below `DumpReader`. A reader only looks at
the bytes that it is given: it opens, writes and runs nothing. A file may be recognised by several
readers (a log holds tracebacks, stacks and lines of the NCCL watchdog), and each reads its part.
"""

import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import PurePosixPath
from pkgutil import walk_packages
from typing import ClassVar, Final

import msgspec

import distdiag.dumps as package
from distdiag.events.base import Event
from distdiag.record.user_code import FRAMEWORKS, LIBRARIES, is_user_file

# Whether a file that a dump names is the user's own, when the dump was made on another machine.

_STDLIB: Final = re.compile(r"/(?:lib|lib64|Lib)/python3\.\d+t?/(?!site-packages/|dist-packages/)")
# What pip makes of an entry point: ``/opt/venv/bin/torchrun``.
_CONSOLE_SCRIPT: Final = re.compile(r"/bin/[\w-]+$")
_FOREIGN: Final = FRAMEWORKS | LIBRARIES | sys.stdlib_module_names | {"distdiag"}


@lru_cache(maxsize=4096)
def is_foreign_user_file(path: str) -> bool:
    """Whether frames of this file are the user's own, judged by the path alone.

    A path that is not absolute begins with the name of a module, as py-spy shortens it.
    """
    if not path.startswith("/"):
        first = PurePosixPath(path).parts[:1]
        if not first or first[0].removesuffix(".py") in _FOREIGN:
            return False
    if _STDLIB.search(path) or _CONSOLE_SCRIPT.search(path):
        return False
    return is_user_file(path, None)


# The contract of a reader, and what finds the readers.

UNKNOWN_RANK = -1
"""What the `rank` of an event is while `RankDump.rank` is None."""


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """One file, or one member of an archive, held in memory.

    `path` is what the user sees, with control characters escaped; members of archives are
    ``archive.tar.gz!member``. `is_cut` says that `data` is only the end of a larger file.
    """

    path: str
    data: bytes
    is_cut: bool = False


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """What one file says of one rank.

    `rank` is None where the content does not say whose it is: names tell later (`rank_names`), and
    until then the events have the rank `UNKNOWN_RANK`. `local_rank` and `pid` are set where the
    content says them. `source` is the name of the reader.

    `label` is what the process is called where no rank is known in the end; a dump with neither is
    left out. `node` is the host or pod whose local rank it is, if it is named. `place` is where in
    the file it begins, in bytes: it orders what has no time. `is_whole_job`: it is true of every
    process of the job. `is_node`: it is of a node that failed, and of no process. `is_vague`: it
    counts only where nothing else tells how a process ended.

    The events' `seq` is -1, as for all that is seen from outside of a process. `time_ns` is the
    wall clock since 1970 where the text tells it, else 0. The order is that of the file.
    """

    rank: int | None
    events: tuple[Event, ...]
    path: str
    source: str
    local_rank: int | None = None
    pid: int | None = None
    label: str = ""
    node: str = ""
    place: int = 0
    is_whole_job: bool = False
    is_node: bool = False
    is_vague: bool = False

    @property
    def last_rank(self) -> int:
        """The highest rank that it knows or mentions; -1 for none."""
        return -1 if self.rank is None else self.rank


class LargeFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is opened where it is read, so that it is in memory once.

    `path` is where it lies, `shown` what the user sees.
    """

    path: str
    shown: str


class DumpReader:
    """One format of foreign files."""

    name: ClassVar[str]

    def recognises(self, dump: Dump) -> bool:
        """Say whether this reader may find something, from signs that are quick to look for."""
        raise NotImplementedError

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield what the file says, one or more times for each rank.

        Raises:
            DamagedFileError: the file cannot be read any further; the message names its path.

        """
        raise NotImplementedError


def load_readers() -> tuple[DumpReader, ...]:
    """Make one reader of each kind that the modules of this package define, ordered by name."""
    modules = [import_module(m.name) for m in walk_packages(package.__path__, "distdiag.dumps.")]
    kinds = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, DumpReader) and hasattr(value, "name")
    }
    return tuple(sorted((kind() for kind in kinds), key=lambda reader: reader.name))
