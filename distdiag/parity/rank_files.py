"""Reads what all ranks of a run recorded: summaries and indices at once, bytes on demand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from distdiag.config.tasks import RankSummary
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.record.recording import AnyRecord, Ended, read_index

Summary = TypeVar("Summary", RankSummary, Ended)
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Recorded = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
"""Numbers in single precision if they were recorded in that or a lower one."""

UNIT: Final[Mapping[str, float]] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
"""The distance from one to the next number, by dtype."""


class RankFiles(Generic[Summary, AnyRecord]):
    """The recordings of all ranks of a run, as they lie in one folder."""

    def __init__(self, folder: Path, summary: type[Summary], record: type[AnyRecord]) -> None:
        """Read summaries and indices of these types; map no data yet.

        Raises:
            DamagedFileError: a file is damaged, or there is none.

        """
        self._folder = folder
        found = sorted(
            (_summary(path, summary) for path in folder.glob("rank-*.json")),
            key=lambda each: each.rank,
        )
        if not found:
            raise DamagedFileError(f"{folder}: no rank has recorded anything")
        self.summaries: dict[int, Summary] = {each.rank: each for each in found}
        self.records: dict[int, tuple[AnyRecord, ...]] = {
            rank: tuple(read_index(folder / f"rank-{rank}.index", record))
            for rank in self.summaries
        }
        self._mapped: dict[int, Bytes] = {}

    @property
    def num_steps(self) -> int:
        """How many steps all ranks have recorded."""
        return min(each.num_steps for each in self.summaries.values())

    def bytes(self, rank: int, record: AnyRecord) -> Bytes:
        """Return the bytes of a record.

        Raises:
            DamagedFileError: the file ends too early.

        """
        if not record.num_bytes:
            return np.empty(0, np.uint8)
        path = self._folder / f"rank-{rank}.data"
        if rank not in self._mapped:
            self._mapped[rank] = np.asarray(np.memmap(path, np.uint8, "r"))
        data = self._mapped[rank][record.place : record.place + record.num_bytes]
        if len(data) < record.num_bytes:
            raise DamagedFileError(f"{path} ends too early")
        return data


def _summary(path: Path, kind: type[Summary]) -> Summary:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNDECODABLE as error:
        raise DamagedFileError(f"{path}: not the summary of a recording: {error}") from None
