"""What one rank of a run recorded for a comparison: an index of records, and the bytes beside it.

A rank has three files: ``rank-0.index`` is a sequence of records, each behind its length,
``rank-0.data`` holds the bytes that they name, and ``rank-0.json`` says how the recording ended.
Samples are pickled, and only read by ranks of the script that wrote them; nothing else in them is
ever run. Parity records tensors (`Record`), moe-determinism what led to the
choices of routers (`RouteRecord`).
"""

import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, overload

import msgspec

from distdiag.config.tasks import RankSummary
from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.routing import Choice
from distdiag.record.private_file import make_private_folder, private_stream

_LENGTH: Final = struct.Struct("<I")


class Kind(StrEnum):
    """What a record holds."""

    BATCH = "batch"  # one tensor of a batch, or plain values
    SAMPLES = "samples"  # what a batch was collated from, for the ranks that make another one
    START = "start"  # a parameter before the first step
    LOSS = "loss"  # what backward was called on
    OUTPUT = "output"  # figures of what a module returned, for each sample
    FUNCTION = "function"  # the same of what a function of the program returned
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
    of what is no tensor. `among` are the ranks of the mesh whose parts make up the `shape`. `site`
    is the line that returned it.
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
    site: Frame | None = None


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


AnyRecord = TypeVar("AnyRecord", Record, RouteRecord)


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

    def write(self, record: Record | RouteRecord, data: bytes | memoryview = b"") -> None:
        """Append a record and its bytes."""
        placed = msgspec.structs.replace(record, place=self._place, num_bytes=len(data))
        encoded = msgspec.msgpack.encode(placed)
        self._index.write(_LENGTH.pack(len(encoded)) + encoded)
        self._data.write(data)
        self._place += len(data)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._data.flush()
        self._index.flush()

    def close(self, summary: RankSummary | Ended) -> None:
        """Write the summary and close the files."""
        self.flush()
        (self._folder / f"rank-{self._rank}.json").write_bytes(msgspec.json.encode(summary))
        self._index.close()
        self._data.close()


@overload
def read_index(path: Path) -> Iterator[Record]: ...
@overload
def read_index(path: Path, kind: type[AnyRecord]) -> Iterator[AnyRecord]: ...
def read_index(path: Path, kind: type[Any] = Record) -> Iterator[Any]:
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
            yield msgspec.msgpack.decode(data[place : place + size], type=kind)
        except UNDECODABLE as error:
            raise DamagedFileError(f"{path}: not the index of a recording: {error}") from None
        place += size
