"""Tensors that one rank of a run recorded: an index of what there is, and the bytes beside it.

A rank has two files: ``rank-0.index`` is a sequence of records, each behind its length, and
``rank-0.data`` holds the bytes that they name. Nothing in them is ever run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from distdiag.config.tasks import RankSummary
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.record.private_file import make_private_folder, private_stream

_LENGTH: Final = struct.Struct("<I")


class Kind(StrEnum):
    """What a record holds."""

    BATCH = "batch"  # one tensor of a batch, or plain values
    START = "start"  # a parameter before the first step
    LOSS = "loss"  # what backward was called on
    OUTPUT = "output"  # figures of what a module returned, for each sample
    GRADIENT = "gradient"  # before anything clips it
    NORM = "norm"  # what clipping returned
    PARAMETER = "parameter"  # after the optimizer's step
    RATE = "rate"  # the learning rates of an optimizer


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One recorded tensor, or this rank's part of it.

    `at` and `part` say where in the `shape` of the whole the part lies and how large it is; of a
    flat part the whole is taken as one row. `micro` is the backward pass within the step, or the
    number of the batch. Without bytes (`num_bytes` 0) another rank has recorded the same, and
    `digest` tells whether it is the same; with `is_kept` a wrapper sees to that. `values` are those
    of what is no tensor. `among` are the ranks of the mesh whose parts make up the `shape`.
    """

    kind: Kind
    step: int
    micro: int
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    place: int = 0
    num_bytes: int = 0
    digest: str = ""
    is_flat: bool = False
    values: tuple[float | int | str | bool | None, ...] | None = None
    is_kept: bool = False
    among: tuple[int, ...] = ()


class RecordingWriter:
    """Appends records to the files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the files; an older recording of this rank there is replaced.

        Raises:
            OSError: they cannot be written.

        """
        make_private_folder(folder)
        self._folder, self._rank = folder, rank
        self._index = private_stream(folder / f"rank-{rank}.index")
        self._data = private_stream(folder / f"rank-{rank}.data")
        self._place = 0

    def write(self, record: Record, data: bytes | memoryview = b"") -> None:
        """Append a record and its bytes."""
        size = len(data)
        placed = msgspec.structs.replace(record, place=self._place, num_bytes=size)
        encoded = msgspec.msgpack.encode(placed)
        self._index.write(_LENGTH.pack(len(encoded)) + encoded)
        self._data.write(data)
        self._place += size

    def flush(self) -> None:
        """Hand everything to the system."""
        self._data.flush()
        self._index.flush()

    def close(self, summary: RankSummary) -> None:
        """Write the summary and close the files."""
        self.flush()
        (self._folder / f"rank-{self._rank}.json").write_bytes(summary.to_json())
        self._index.close()
        self._data.close()


def read_index(path: Path) -> Iterator[Record]:
    """Yield the records of one rank; a last one that was not written wholly is left out.

    Raises:
        DamagedFileError: the file holds something else.

    """
    data = path.read_bytes()
    place = 0
    while place + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + size > len(data):
            return
        try:
            yield msgspec.msgpack.decode(data[place : place + size], type=Record)
        except UNDECODABLE as error:
            raise DamagedFileError(f"{path}: not the index of a recording: {error}") from None
        place += size
