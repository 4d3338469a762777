"""The members of zip, tar and gzip files, without unpacking anything to disk."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, cast

import msgspec

from distdiag.dumps.limits import Budget, MeteredStream
from distdiag.errors import DamagedFileError

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
            setattr(archive, "members", [])  # noqa: B010 (they would all be kept; it has no type)
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
