"""Walk over files, folders and archives that strangers left, within limits, and hand out bytes.

Nothing is written or unpacked to disk, nothing outside of what the user named is read, and memory
holds one file at a time. What is refused is told with one line.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from distdiag.dumps.archives import Member, is_archive, members
from distdiag.dumps.limits import Budget, Limits
from distdiag.dumps.reading import Dump
from distdiag.errors import DamagedFileError


class Refused(msgspec.Struct, frozen=True):
    """A file that was not read, or not to its end, and why, in a few words."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def walk(
    paths: Iterable[str | Path],
    *,
    limits: Limits | None = None,
    skip_folder: Callable[[Path], bool] = lambda folder: False,
) -> Iterator[Dump | Refused]:
    """Yield every regular file below the paths, members of archives included, in order of names.

    Folders that `skip_folder` says yes to are left out. Devices, pipes and sockets are passed over,
    and so are symbolic links that stay within the folder, since their target is met itself.
    """
    budget = Budget(limits or Limits())
    for path in paths:
        yield from _Walk(Path(path), budget, skip_folder).entries()
        if budget.is_spent:
            yield Refused(printable(os.fspath(path)), f"{budget.reason}; the rest is not read")
            return


def printable(path: str) -> str:
    """Return a path as it can be shown: control characters and broken encodings are escaped."""
    if path.isprintable():
        return path
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path
    )


class _Walk:
    """The walk below one path that the user named."""

    def __init__(self, root: Path, budget: Budget, skip_folder: Callable[[Path], bool]) -> None:
        self._root = root
        self._real_root = os.path.realpath(root)
        self._budget = budget
        self._skip_folder = skip_folder

    def entries(self) -> Iterator[Dump | Refused]:
        if self._root.is_dir():
            yield from self._folder(self._root, depth=0)
        else:
            yield from self._file(self._root, may_follow=True)

    def _folder(self, folder: Path, depth: int) -> Iterator[Dump | Refused]:
        if depth > self._budget.limits.deepest_folder:
            yield self._refused(folder, f"is more than {depth - 1} folders deep")
            return
        if self._skip_folder(folder):
            return
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            yield self._refused(folder, f"cannot be listed: {error.strerror}")
            return
        for entry in entries:
            if self._budget.is_spent:
                return
            path = folder / entry.name
            if entry.is_symlink():
                yield from self._link(path)
            elif entry.is_dir(follow_symlinks=False):
                yield from self._folder(path, depth + 1)
            elif entry.is_file(follow_symlinks=False):
                yield from self._file(path, may_follow=False)

    def _link(self, path: Path) -> Iterator[Refused]:
        target = os.path.realpath(path)
        if target != self._real_root and not target.startswith(self._real_root + os.sep):
            yield self._refused(
                path, "is a link that leaves the folder; name its target to read it"
            )

    def _file(self, path: Path, *, may_follow: bool) -> Iterator[Dump | Refused]:
        # What was a file when the folder was listed may be a pipe or a link by now.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if may_follow else os.O_NOFOLLOW)
        try:
            file = os.fdopen(os.open(path, flags), "rb")
        except (OSError, ValueError) as error:
            yield self._refused(path, f"cannot be opened: {getattr(error, 'strerror', error)}")
            return
        with file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                yield from self._content(file, printable(os.fspath(path)))
            elif may_follow:
                yield self._refused(path, "is no regular file")

    def _content(self, file: BinaryIO, shown: str) -> Iterator[Dump | Refused]:
        self._budget.count_file()
        try:
            is_packed = is_archive(file.read(512))
            file.seek(0)
            if is_packed:
                yield from _unpacked(file, shown, self._budget)
            else:
                yield from _plain(file, shown, self._budget.limits.most_bytes)
        except OSError as error:
            yield Refused(shown, f"cannot be read: {error.strerror}")

    def _refused(self, path: Path, reason: str) -> Refused:
        return Refused(printable(os.fspath(path)), reason)


def _plain(file: BinaryIO, shown: str, most_bytes: int) -> Iterator[Dump | Refused]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > most_bytes:
        if b"\0" in file.read(4096):
            yield Refused(shown, f"is binary and larger than {most_bytes >> 20} MiB")
            return
        file.seek(size - most_bytes)
        yield Refused(shown, f"is large: only its last {most_bytes >> 20} MiB are read")
    # A file that still grows is read as far as it went when it was opened.
    data = file.read(min(size, most_bytes))
    yield Dump(path=shown, data=data, is_cut=size > most_bytes)


def _unpacked(
    file: BinaryIO, shown: str, budget: Budget, depth: int = 1
) -> Iterator[Dump | Refused]:
    """Yield the members of an archive, and those of the archives in it."""
    if depth > budget.limits.deepest_archive:
        yield Refused(shown, f"is an archive more than {depth - 1} archives deep")
        return
    try:
        for member in members(file, budget):
            path = f"{shown}!{printable(member.name)}" if member.name else shown
            yield from _member(member, path, budget, depth)
    except DamagedFileError as error:
        yield Refused(shown, str(error))


def _member(member: Member, shown: str, budget: Budget, depth: int) -> Iterator[Dump | Refused]:
    if member.problem:
        yield Refused(shown, member.problem)
    elif member.is_cut:
        yield Refused(shown, f"is large: only its last {len(member.data) >> 20} MiB are read")
    elif is_archive(member.data[:512]):
        yield from _unpacked(io.BytesIO(member.data), shown, budget, depth + 1)
        return
    if member.data:
        yield Dump(path=shown, data=member.data, is_cut=member.is_cut)
