"""Walk over files, folders and archives that strangers left, within limits, and hand out bytes.

Nothing is written or unpacked to disk, nothing outside of what the user named is read, and memory
holds one file at a time. What is refused is told with one line.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from distdiag.dumps.bystanders import (
    HEAD_BYTES,
    LARGE,
    is_skipped_folder,
    kind_by_head,
    kind_by_name,
)
from distdiag.dumps.reading import Dump, LargeFile
from distdiag.events.errors import DamagedFileError

# What may be read of files that strangers left: sizes, numbers, depths, and streams that obey.

_ALWAYS_PLAUSIBLE: Final = 32 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one walk.

    `most_bytes` of one file are held in memory at a time, and `most_text` of one that is no archive
    and nobody passes on, from `large` on; `most_unpacked` come out of archives in
    all; `most_ratio` is how many bytes one packed byte may become, beyond the first 32 MiB (logs
    reach 50, a bomb of zeros 1,000). Folders and archives are entered `deepest_…` deep.
    """

    most_bytes: int = 128 << 20
    most_text: int = 256 << 20
    large: int = 8 << 20
    most_unpacked: int = 4 << 30
    most_files: int = 200_000
    most_ratio: int = 200
    deepest_folder: int = 32
    deepest_archive: int = 3


class Budget:
    """What is left of the limits during one walk. `reason` says which was reached first."""

    def __init__(self, limits: Limits) -> None:
        """Start with nothing used."""
        self.limits = limits
        self.reason = ""
        self._num_files = 0
        self._num_unpacked = 0

    @property
    def is_spent(self) -> bool:
        """Nothing more may be read."""
        return bool(self.reason)

    def count_file(self) -> None:
        """Count one file or member."""
        self._num_files += 1
        if self._num_files >= self.limits.most_files:
            self.reason = self.reason or f"holds more than {self.limits.most_files:,} files"

    def count_unpacked(self, num_bytes: int) -> None:
        """Count bytes that came out of an archive.

        Raises:
            DamagedFileError: they are more than may come out of all archives together.

        """
        self._num_unpacked += num_bytes
        if self._num_unpacked > self.limits.most_unpacked:
            self.reason = f"unpacks to more than {self.limits.most_unpacked >> 20} MiB"
            raise DamagedFileError(self.reason)


_MOST_EMPTY: Final = 16
"""A reader finds the end of a stream a few times. That of tar files asks again for each block of a
member that claims to be longer."""


class MeteredStream:
    """A stream of unpacked bytes that refuses to become implausibly long.

    While `allowance` is a number, so many bytes may be read and no more.
    """

    def __init__(self, read: Callable[[int], bytes], packed_bytes: int, budget: Budget) -> None:
        """Take bytes from `read`; they all come from `packed_bytes` packed ones."""
        self._take = read
        self._plausible = max(_ALWAYS_PLAUSIBLE, packed_bytes * budget.limits.most_ratio)
        self._budget = budget
        self._num_read = 0
        self._num_empty = 0
        self._head = b""
        self.allowance: int | None = None

    def peek(self, size: int) -> bytes:
        """Return the next bytes and leave them in the stream."""
        while len(self._head) < size and (more := self._next(size - len(self._head))):
            self._head += more
        return self._head

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes.

        Raises:
            DamagedFileError: a limit is reached.

        """
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._next(size)

    def _next(self, size: int) -> bytes:
        data = self._take(size)
        self._num_empty += not data
        if self._num_empty > _MOST_EMPTY:
            raise EOFError("it ends within a member")
        self._budget.count_unpacked(len(data))
        self._num_read += len(data)
        if self._num_read > self._plausible:
            raise DamagedFileError(
                f"looks like an archive bomb: more than {self._plausible >> 20} MiB come out of it"
            )
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                raise DamagedFileError("is damaged: the header of a member is too long")
        return data


# The members of zip, tar and gzip files, without unpacking anything to disk.

_CHUNK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_ZIP: Final = (b"PK\x03\x04", b"PK\x05\x06")
_UNKNOWN_PACKERS: Final = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"Rar!\x1a\x07": "rar",
}
_TAR_HEAD: Final = 512
_LONGEST_HEADER: Final = 1 << 20
_LEAVES: Final = "is a link that leaves the archive"

# What the standard library's readers raise on bytes that nobody packed.
_DAMAGE: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,  # encrypted members, and packers that are not known (NotImplementedError)
    ValueError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an archive. The only one of a plain .gz has the name ``""``.

    `is_cut` says that `data` is only its end, `problem` why it was not read, or not to its end.
    """

    name: str
    data: bytes = b""
    is_cut: bool = False
    problem: str = ""


def is_archive(head: bytes) -> bool:
    """Say whether a file that begins with these 512 bytes is packed."""
    return head.startswith((_GZIP, *_ZIP, *_UNKNOWN_PACKERS)) or _is_tar(head)


def members(file: BinaryIO, budget: Budget) -> Iterator[Member]:
    """Yield the files in an archive, one at a time.

    Raises:
        DamagedFileError: the archive is damaged, unknown, or over a limit; says so in a few words.

    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_TAR_HEAD)
    file.seek(0)
    for magic, packer in _UNKNOWN_PACKERS.items():
        if head.startswith(magic):
            raise DamagedFileError(f"is packed by {packer}, which is not read: unpack it first")
    try:
        if head.startswith(_GZIP):
            yield from _gzip_members(file, size, budget)
        elif head.startswith(_ZIP):
            yield from _zip_members(file, budget)
        else:
            yield from _tar_members(MeteredStream(file.read, size, budget), budget)
    except _DAMAGE as error:
        raise DamagedFileError(f"is a damaged archive: {_phrase(error)}") from None


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _phrase(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _gzip_members(file: BinaryIO, size: int, budget: Budget) -> Iterator[Member]:
    with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
        stream = MeteredStream(unpacked.read1, size, budget)
        if _is_tar(stream.peek(_TAR_HEAD)):
            yield from _tar_members(stream, budget)
        else:
            yield _read("", stream.read, budget)


def _zip_members(file: BinaryIO, budget: Budget) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            budget.count_file()
            if budget.is_spent:
                return
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir() or kind not in (0, stat.S_IFREG, stat.S_IFLNK):
                continue
            try:
                with archive.open(info) as unpacked:
                    # It is a ZipExtFile; read1 gives what comes before the damage.
                    read = cast(io.BufferedReader, unpacked).read1
                    stream = MeteredStream(read, info.compress_size, budget)
                    member = _read(info.filename, stream.read, budget)
            except _DAMAGE as error:
                yield Member(name=info.filename, problem=f"cannot be unpacked: {_phrase(error)}")
                continue
            if kind != stat.S_IFLNK:
                yield member
            # The content of a link is its target; a target inside is a member itself.
            elif _leaves(info.filename, member.data[:4096].decode(errors="replace")):
                yield Member(name=info.filename, problem=_LEAVES)


def _tar_members(stream: MeteredStream, budget: Budget) -> Iterator[Member]:
    stream.allowance = _LONGEST_HEADER
    with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as archive:
        while (info := archive.next()) is not None:
            vars(archive)["members"].clear()  # else all would be kept
            budget.count_file()
            if budget.is_spent:
                return
            stream.allowance = None
            yield from _tar_member(archive, info, budget)
            stream.allowance = _LONGEST_HEADER


def _tar_member(
    archive: tarfile.TarFile, info: tarfile.TarInfo, budget: Budget
) -> Iterator[Member]:
    if info.issym() and _leaves(info.name, info.linkname):
        yield Member(name=info.name, problem=_LEAVES)
    elif info.isreg() and info.issparse():
        yield Member(name=info.name, problem="is a sparse file, which is not unpacked")
    elif info.isreg() and (unpacked := archive.extractfile(info)) is not None:
        yield _read(info.name, unpacked.read, budget)


def _read(name: str, read: Callable[[int], bytes], budget: Budget) -> Member:
    """Read a stream to its end, or to where it is damaged, and keep the end of what is there."""
    chunks: deque[bytes] = deque()
    size, is_cut, problem = 0, False, ""
    most_bytes = budget.limits.most_bytes
    try:
        while chunk := read(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            while size - len(chunks[0]) >= most_bytes:
                size -= len(chunks.popleft())
                is_cut = True
    except _DAMAGE as error:
        problem = f"is damaged, and read only so far: {_phrase(error)}"
    data = b"".join(chunks)
    is_cut = is_cut or len(data) > most_bytes
    return Member(name=name, data=data[-most_bytes:], is_cut=is_cut, problem=problem)


def _leaves(name: str, target: str) -> bool:
    path = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return path.startswith(("/", "..")) or os.path.isabs(target)


# The walk over what was named, within its limits.


LOOKED_AT: Final = 1 << 20
"""So much of the end of a large text is searched for signs of a log."""


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
    passed_over: Counter[str] | None = None,
) -> Iterator[Dump | LargeFile | Refused]:
    """Yield every regular file below the paths, members of archives included, in order of names.

    Folders that `skip_folder` says yes to are left out, and so is what lies in folders and is no
    evidence: `passed_over` counts it by kind, such as sources and checkpoints. Devices, pipes and
    sockets are passed over, and so are symbolic links that stay within the folder, since their
    target is met itself.
    """
    budget = Budget(limits or Limits())
    passed_over = Counter() if passed_over is None else passed_over
    for path in paths:
        yield from _Walk(Path(path), budget, skip_folder, passed_over).entries()
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

    def __init__(
        self,
        root: Path,
        budget: Budget,
        skip_folder: Callable[[Path], bool],
        passed_over: Counter[str],
    ) -> None:
        self._root = root
        self._passed_over = passed_over
        self._real_root = os.path.realpath(root)
        self._budget = budget
        self._skip_folder = skip_folder

    def entries(self) -> Iterator[Dump | LargeFile | Refused]:
        if self._root.is_dir():
            yield from self._folder(self._root, depth=0)
        else:
            yield from self._file(self._root, may_follow=True)

    def _folder(self, folder: Path, depth: int) -> Iterator[Dump | LargeFile | Refused]:
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
            yield from self._entry(entry, folder / entry.name, depth)

    def _entry(
        self, entry: os.DirEntry[str], path: Path, depth: int
    ) -> Iterator[Dump | LargeFile | Refused]:
        if entry.is_symlink():
            yield from self._link(path)
        elif entry.is_dir(follow_symlinks=False):
            if not is_skipped_folder(entry.name):
                yield from self._folder(path, depth + 1)
        elif kind := kind_by_name(entry.name):
            self._passed_over[kind] += 1
        elif entry.is_file(follow_symlinks=False):
            yield from self._file(path, may_follow=False)

    def _link(self, path: Path) -> Iterator[Refused]:
        target = os.path.realpath(path)
        if target != self._real_root and not target.startswith(self._real_root + os.sep):
            yield self._refused(
                path, "is a link that leaves the folder; name its target to read it"
            )

    def _file(self, path: Path, *, may_follow: bool) -> Iterator[Dump | LargeFile | Refused]:
        try:
            file = open_any(path, may_follow=may_follow)
        except (OSError, ValueError) as error:
            yield self._refused(path, f"cannot be opened: {getattr(error, 'strerror', error)}")
            return
        with file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                if not may_follow and (kind := _kind(file, path.name)):
                    self._passed_over[kind] += 1
                    return
                yield from self._content(file, path, printable(os.fspath(path)))
            elif may_follow:
                yield self._refused(path, "is no regular file")

    def _content(
        self, file: BinaryIO, path: Path, shown: str
    ) -> Iterator[Dump | LargeFile | Refused]:
        self._budget.count_file()
        try:
            is_packed = is_archive(file.read(512))
            file.seek(0)
            if is_packed:
                yield from _unpacked(file, shown, self._budget)
            else:
                yield _plain(file, path, shown, self._budget.limits)
        except OSError as error:
            yield Refused(shown, f"cannot be read: {error.strerror}")

    def _refused(self, path: Path, reason: str) -> Refused:
        return Refused(printable(os.fspath(path)), reason)


def _kind(file: BinaryIO, name: str) -> str:
    """Return what a file in a folder is if it is no evidence, from its first and last bytes."""
    size = file.seek(0, os.SEEK_END)
    tail = b""
    if size > LARGE:
        file.seek(-LOOKED_AT, os.SEEK_END)
        tail = file.read(LOOKED_AT)
    file.seek(0)
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return kind_by_head(name, head, tail, size)


def dumps_of_stream(stream: BinaryIO, shown: str) -> Iterator[Dump | Refused]:
    """Yield what comes out of a pipe: a log, of which the end is kept, or an archive.

    It is read to its end, however long that takes.
    """
    limits = Limits()
    member = _read("", stream.read, Budget(msgspec.structs.replace(limits, most_unpacked=1 << 62)))
    file = io.BytesIO(member.data)
    if member.is_cut:
        yield Refused(shown, f"is large: only its last {limits.most_bytes >> 20} MiB are read")
        yield Dump(path=shown, data=member.data, is_cut=True)
    elif is_archive(member.data[:_TAR_HEAD]):
        yield from _unpacked(file, shown, Budget(limits))
    else:
        yield Dump(path=shown, data=member.data)


def _plain(file: BinaryIO, path: Path, shown: str, limits: Limits) -> Dump | LargeFile | Refused:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > limits.large:
        is_text = b"\0" not in file.read(4096)
        if is_text or size <= limits.most_bytes:
            return LargeFile(path=os.path.realpath(path), shown=shown)
        return Refused(shown, f"is binary and larger than {limits.most_bytes >> 20} MiB")
    # A file that still grows is read as far as it went when it was opened.
    return Dump(path=shown, data=file.read(size))


def open_any(path: Path | str, *, may_follow: bool = False) -> BinaryIO:
    """Open what was a file when its folder was listed: it may be a pipe or a link by now.

    Raises:
        OSError, ValueError: it cannot be opened.

    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if may_follow else os.O_NOFOLLOW)
    return os.fdopen(os.open(path, flags), "rb")


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
