"""What one rank recorded of its routing: an index of records, and the arrays beside it.

A rank has three files: ``rank-0.index`` is a sequence of records, each behind its length,
``rank-0.data`` holds the arrays that they name, and ``rank-0.json`` says how the recording ended.
Nothing in them is ever run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.routing import Choice
from distdiag.record.private_file import make_private_folder, private_stream

_LENGTH: Final = struct.Struct("<I")


class Seen(StrEnum):
    """What a record holds."""

    RANDOM = "random"  # the states of the default generators when a step began
    WEIGHTS = "weights"  # the tensors of the models when a step began
    CHOICE = "choice"  # what a router chose
    OUTPUT = "output"  # what a module was given and returned
    GRADIENT = "gradient"  # of one parameter, before the optimizer's step


class RouteRecord(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a rank saw, in the order in which it saw them.

    `micro` is the backward pass within the step, `call` numbers the calls of a module in one, apart
    for those that activation checkpointing repeats; `number` the choices in one call. `outer` is
    the module within whose forward pass the call was made, `pass_number` counts the forward passes
    of whole models. `digests` are those of ``given`` and ``returned``, ``scores`` and ``chosen``,
    or of generators and parameters by name. `ops` are the calls of torch in the module itself that
    may give another result when they are repeated; `is_drawn`: it drew random numbers,
    `is_meant_random`: its options say so. `num_bytes` of the data from `place` on are, for a
    choice, the chosen indices (int32), the last score that was chosen, the first that was not and
    the greatest of the row (float64) of all tokens; else a sample of what the module returned
    (float32).
    """

    seen: Seen
    step: int
    micro: int
    name: str
    call: int = 0
    number: int = 0
    is_recompute: bool = False
    kind: str = ""
    outer: str = ""
    pass_number: int = 0
    digests: dict[str, str] = {}
    rows: tuple[str, ...] = ()
    dtype: str = ""
    ops: tuple[str, ...] = ()
    is_drawn: bool = False
    is_meant_random: bool = False
    choice: Choice | None = None
    place: int = 0
    num_bytes: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What the same thing in another run has in common with this one."""
        return (
            self.seen,
            self.step,
            self.micro,
            self.name,
            self.is_recompute,
            self.call,
            self.number,
        )


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the recording of a rank ended."""

    rank: int
    num_steps: int
    num_choices: int


class RouteWriter:
    """Appends records to the files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the files.

        Raises:
            OSError: they cannot be written.

        """
        make_private_folder(folder)
        self._folder, self._rank = folder, rank
        self._index = private_stream(folder / f"rank-{rank}.index")
        self._data = private_stream(folder / f"rank-{rank}.data")
        self._place = 0

    def write(self, record: RouteRecord, data: bytes = b"") -> None:
        """Append a record and its arrays."""
        placed = msgspec.structs.replace(record, place=self._place, num_bytes=len(data))
        encoded = msgspec.msgpack.encode(placed)
        self._index.write(_LENGTH.pack(len(encoded)) + encoded)
        self._data.write(data)
        self._place += len(data)

    def close(self, ended: Ended) -> None:
        """Say how it ended and close the files."""
        self._index.close()
        self._data.close()
        path = self._folder / f"rank-{self._rank}.json"
        path.write_bytes(msgspec.json.encode(ended))


def read_records(path: Path) -> Iterator[RouteRecord]:
    """Yield the records of one rank; a last one that was not written wholly is left out.

    Raises:
        DamagedFileError: the file holds something else.

    """
    data, place = path.read_bytes(), 0
    while place + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + size > len(data):
            return
        try:
            yield msgspec.msgpack.decode(data[place : place + size], type=RouteRecord)
        except UNDECODABLE as error:
            raise DamagedFileError(f"{path}: not a recording of routing: {error}") from None
        place += size


def read_ended(path: Path) -> Ended:
    """Return how the recording of a rank ended.

    Raises:
        DamagedFileError: the file holds something else.

    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ended)
    except UNDECODABLE as error:
        raise DamagedFileError(f"{path}: not the end of a recording: {error}") from None
