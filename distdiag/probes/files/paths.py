"""One name for each file: absolute, with the links of its folder resolved, or no name at all.

What is the interpreter's own or the system's, and what is ours, has no name: ranks do not talk to
one another by such files.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from typing import Final, NamedTuple

from distdiag.probes.untyped import Untyped

# Whether ranks on other nodes see the same file: decided by the type of its file system.

MOUNTS: Final = "/proc/self/mountinfo"

SHARED_TYPES: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "exafs",
        "fhgfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
"""Types of file systems that several hosts mount, as the kernel calls them."""

LOCAL_FUSE: Final = frozenset(
    {
        "fuse-overlayfs",
        "fuse.bindfs",
        "fuse.encfs",
        "fuse.fuse-overlayfs",
        "fuse.gocryptfs",
        "fuse.gvfsd-fuse",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.ntfs",
        "fuse.ntfs-3g",
        "fuse.portal",
        "fuse.snapfuse",
        "fuse.squashfuse",
        "fuseblk",
        "fusectl",
    }
)
"""File systems in user space whose files lie on this host; all others fetch them from elsewhere."""

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


def is_shared_type(kind: str) -> bool:
    """Say whether files of a file system of this type are seen by other hosts."""
    return kind in SHARED_TYPES or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


class MountTable:
    r"""The file systems of this process and where they are mounted.

    A line of the table (proc_pid_mountinfo(5)) has the place as its fifth word, with blanks as
    ``\040``, and the type as the first word behind the hyphen.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Read the lines; later ones hide earlier ones at the same place."""
        types: dict[str, str] = {}
        for line in lines:
            before, hyphen, after = line.partition(" - ")
            words = before.split()
            if hyphen and len(words) > 4 and after.split():
                place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), words[4])
                types[place.rstrip("/") + "/"] = after.split()[0]
        # The longest place first: that is the one that a path lies in.
        self._types = sorted(types.items(), key=lambda item: -len(item[0]))

    @classmethod
    def of_this_process(cls) -> MountTable:
        """Read the kernel's table; where there is none, everything counts as local."""
        try:
            descriptor = os.open(MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return cls(())
        with os.fdopen(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            return cls(file.readlines())

    def is_shared(self, folder: str) -> bool:
        """Say whether other hosts see what is in this folder (absolute, ends with ``/``)."""
        kind = next((kind for place, kind in self._types if folder.startswith(place)), "")
        return is_shared_type(kind)


# Finds the one name of a file.

_MOST_FOLDERS: Final = 4096
_LONGEST_PATH: Final = 4096
NO_NAMES: Final = frozenset({"", ".", ".."})

NO_FILES: Final = ("/proc/", "/sys/", "/dev/null")
"""What begins so is left at once."""

_KERNEL: Final = ("/proc", "/sys", "/dev")
_SHARED_MEMORY: Final = "/dev/shm/"
_SYSTEM: Final = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/run", "/sbin", "/usr")
_CACHES: Final = (
    "/__pycache__/",
    "/torchinductor_",
    "/.triton/",
    "/site-packages/",
    "/dist-packages/",
)
"""Folders that their owners keep safe for several writers: compiled code and installed packages."""


class Place(NamedTuple):
    """Where an access goes: the resolved path, what the program wrote, and who else sees it."""

    path: str
    written: str
    is_shared: bool


# Making a tuple of a class is cheaper this way.
_place: Final = functools.partial(tuple.__new__, Place)


class _Folder(NamedTuple):
    path: str  # ends with a slash
    is_ignored: bool
    is_shared: bool


class FilePaths:
    """Finds the place of a path, from a table of the folders that were met before."""

    def __init__(self, own_folder: str, main_script: str | None) -> None:
        """Ignore our own folder; those of the script and of the start are no system folders."""
        self._cwd: str | None = None
        self._folders: dict[str, _Folder] = {}
        self.plain: dict[str, str] = {}
        """Folders of this host without anything special, as written and as resolved."""
        self._above: set[str] = set()
        self._mounts: MountTable | None = None
        interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
        interpreter |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
        self._never = _as_prefixes(
            {*interpreter, own_folder, *_KERNEL} - {"/", "/usr", "/usr/local"}
        )
        homes = {self._ask_cwd(), os.path.dirname(main_script or "")} - {"", "/"}
        self._kept = _as_prefixes(homes)
        self._system = _as_prefixes(_SYSTEM)

    def forget_cwd(self) -> None:
        """Resolve anew what is relative."""
        self._forget_all()
        self._cwd = None

    def forget(self, path: str) -> None:
        """Resolve anew what lies below this path: it is removed or becomes something else."""
        if path in self._above:
            self._forget_all()

    def _forget_all(self) -> None:
        self._folders.clear()
        self._above.clear()
        self.plain.clear()

    def find(self, written: str) -> Place | None:
        """Return where this path leads, or None for what is nobody's business."""
        cut = written.rfind("/") + 1
        prefix, name = written[:cut], written[cut:]
        if name in NO_NAMES:
            full = os.path.realpath(written)
            place = None if full == "/" else self.find(full)
            return None if place is None else place._replace(written=_printable(written))
        known = self._folders.get(prefix) or self._learn(prefix)
        if known.is_ignored or len(written) > _LONGEST_PATH:
            return None
        path = known.path + name
        if not path.isascii() or not written.isascii():
            path, written = _printable(path), _printable(written)
        return _place((path, written, known.is_shared))

    def _ask_cwd(self) -> str:
        try:
            self._cwd = os.getcwd().rstrip("/")
        except FileNotFoundError:
            return ""  # somebody removed it: nothing relative can be opened either
        return self._cwd

    def _learn(self, prefix: str) -> _Folder:
        if len(self._folders) >= _MOST_FOLDERS:
            self._forget_all()
        if "\0" in prefix or len(prefix) > _LONGEST_PATH:
            return _Folder("", is_ignored=True, is_shared=False)
        full = prefix if prefix[:1] == "/" else f"{self._cwd or self._ask_cwd()}/{prefix}"
        path = os.path.realpath(full).rstrip("/") + "/"
        if self._mounts is None:
            self._mounts = MountTable.of_this_process()
        known = _Folder(path, self._is_ignored(path), self._mounts.is_shared(path))
        self._folders[prefix] = known
        if path.isascii() and not known.is_ignored and not known.is_shared:
            self.plain[prefix] = path
        for folder in (os.path.normpath(full), path.rstrip("/")):
            above = folder
            while above and above not in self._above:
                self._above.add(above)
                above = above.rpartition("/")[0]
        return known

    def _is_ignored(self, folder: str) -> bool:
        if folder.startswith(_SHARED_MEMORY):
            return False
        if folder.startswith(self._never) or any(cache in folder for cache in _CACHES):
            return True
        return folder.startswith(self._system) and not folder.startswith(self._kept)


def as_text(given: Untyped) -> str | None:
    """Return a path as text; None if this is no path (a descriptor, nothing, a mistake)."""
    if isinstance(given, int) or given is None:
        return None
    try:
        return os.fsdecode(given) or None
    except TypeError:
        return None


def _printable(path: str) -> str:
    """Spell bytes that are no UTF-8 in a way that can be written down."""
    return path.encode("utf-8", "backslashreplace").decode()


def _as_prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    both = {each for folder in folders for each in (folder, os.path.realpath(folder))}
    return tuple(sorted(folder.rstrip("/") + "/" for folder in both))
