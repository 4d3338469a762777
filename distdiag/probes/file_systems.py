"""Whether ranks on other nodes see the same file: decided by the type of its file system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

MOUNTS: Final = "/proc/self/mountinfo"

SHARED_TYPES: Final = frozenset(
    """
    9p afs beegfs ceph cifs coda davfs exafs fhgfs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2
    orangefs panfs pvfs2 smb3 smbfs virtiofs wekafs
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
"""Types of file systems that several hosts mount, as the kernel calls them."""

LOCAL_FUSE: Final = frozenset(
    """
    fuse-overlayfs fuse.bindfs fuse.encfs fuse.fuse-overlayfs fuse.gocryptfs fuse.gvfsd-fuse
    fuse.lxcfs fuse.mergerfs fuse.ntfs fuse.ntfs-3g fuse.portal fuse.snapfuse fuse.squashfuse
    fuseblk fusectl
    """.split()  # noqa: SIM905 (a list would take a line for each)
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
