"""The recorded routing of one run, read rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distdiag.events.errors import DamagedFileError
from distdiag.record.routing_record import Ended, RouteRecord, Seen, read_ended, read_records

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Indices = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Choices(NamedTuple):
    """What a router chose for each token.

    `inner` is the last score that was chosen, `outer` the first that was not, `size` the greatest
    of the token.
    """

    indices: Indices
    inner: Numbers
    outer: Numbers
    size: Numbers


class Recording:
    """What all ranks of a run recorded."""

    def __init__(self, folder: Path) -> None:
        """Read the indices.

        Raises:
            DamagedFileError: a recording is missing or damaged.

        """
        self._folder = folder
        ended = [read_ended(path) for path in folder.glob("rank-*.json")]
        if not ended:
            raise DamagedFileError(f"{folder}: no rank has recorded anything")
        self.ended: dict[int, Ended] = {each.rank: each for each in ended}
        self.records: dict[int, Sequence[RouteRecord]] = {
            rank: tuple(read_records(folder / f"rank-{rank}.index")) for rank in sorted(self.ended)
        }
        self._data: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    @property
    def num_steps(self) -> int:
        """How many steps all ranks have recorded."""
        return min(each.num_steps for each in self.ended.values())

    @property
    def num_choices(self) -> int:
        """How many choices the ranks recorded together."""
        return sum(each.num_choices for each in self.ended.values())

    def dtypes(self) -> set[str]:
        """Return the types in which modules returned something."""
        return {
            record.dtype
            for records in self.records.values()
            for record in records
            if record.seen in (Seen.OUTPUT, Seen.CHOICE) and record.dtype
        }

    def rows(self, rank: int) -> set[str]:
        """Return the digests of all samples that the models of a rank were given."""
        return {row for record in self.records[rank] for row in record.rows}

    def choices(self, rank: int, record: RouteRecord) -> Choices:
        """Return what a router chose."""
        assert record.choice is not None
        number, k = record.choice.num_tokens, record.choice.k
        data = self._bytes(rank, record)
        indices = data[: 4 * number * k].view(np.int32).reshape(number, k)
        inner, outer, size = data[4 * number * k :].copy().view(np.float64).reshape(3, number)
        return Choices(indices, inner, outer, size)

    def sample(self, rank: int, record: RouteRecord) -> Numbers:
        """Return the sample of what a module returned."""
        return self._bytes(rank, record).view(np.float32).astype(np.float64)

    def _bytes(self, rank: int, record: RouteRecord) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if not record.num_bytes:
            return np.empty(0, np.uint8)
        if rank not in self._data:
            path = self._folder / f"rank-{rank}.data"
            self._data[rank] = np.asarray(np.memmap(path, np.uint8, "r"))
        data = self._data[rank][record.place : record.place + record.num_bytes]
        if len(data) < record.num_bytes:
            raise DamagedFileError(f"{self._folder}/rank-{rank}.data ends too early")
        return data.copy()


def moved(
    first: Recording, again: Recording, rank: int, record: RouteRecord, other: RouteRecord
) -> float:
    """Return by how much the scores at the boundary of a choice moved, -1 if that is not known."""
    if record.choice != other.choice:
        return -1.0
    mine, theirs = first.choices(rank, record), again.choices(rank, other)
    size = np.where(mine.size > 0, mine.size, 1.0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(mine.inner - theirs.inner) / size
    return float(np.max(apart[np.isfinite(apart)], initial=0.0))
