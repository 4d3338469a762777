"""What each rank of a run has recorded, as it lies in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from distdiag.errors import DamagedFileError
from distdiag.parity_task import RankSummary, read_summary
from distdiag.recording import Record

Recorded = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
"""Numbers in single precision if they were recorded in that or a lower one."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class RankData:
    """The contents of recorded tensors, mapped from the files of all ranks when they are asked for.

    What is asked for raises DamagedFileError if a file ends too early.
    """

    def __init__(self, folder: Path) -> None:
        """Map no file yet."""
        self._folder = folder
        self._mapped: dict[int, Bytes] = {}

    def bytes(self, rank: int, record: Record) -> Bytes:
        """Return the bytes of a tensor."""
        if not record.num_bytes:
            return np.empty(0, np.uint8)
        path = self._folder / f"rank-{rank}.data"
        if rank not in self._mapped:
            self._mapped[rank] = np.asarray(np.memmap(path, np.uint8, "r"))
        data = self._mapped[rank][record.place : record.place + record.num_bytes]
        if len(data) < record.num_bytes:
            raise DamagedFileError(f"{path} ends too early")
        return data

    def numbers(self, rank: int, record: Record) -> Recorded:
        """Return a tensor."""
        data, shape = self.bytes(rank, record), record.part or record.shape
        if record.dtype == "bfloat16":
            wide = data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(shape)
        try:
            kind = np.dtype(record.dtype)
        except TypeError:
            kind = np.dtype(np.uint8)
        exact = np.dtype(np.float32 if kind in (np.float16, np.float32) else np.float64)
        numbers: Recorded = data.view(kind).astype(exact, copy=False)
        return numbers.reshape(shape)


def read_summaries(folder: Path) -> dict[int, RankSummary]:
    """Return what each rank says of its recording.

    Raises:
        DamagedFileError: a summary is damaged, or there is none.

    """
    found: dict[int, RankSummary] = {}
    for path in folder.glob("rank-*.json"):
        try:
            summary = read_summary(path.read_bytes())
        except msgspec.MsgspecError as error:
            raise DamagedFileError(f"{path}: not the summary of a recording: {error}") from None
        found[summary.rank] = summary
    if not found:
        raise DamagedFileError(f"{folder}: no rank has recorded anything")
    return dict(sorted(found.items()))
