"""The recorded routing of one run, read rank by rank."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from distdiag.parity.rank_files import Array, RankFiles
from distdiag.record.recording import Ended, RouteRecord, Seen

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


class Choices(NamedTuple):
    """What a router chose for each token.

    `inner` is the last score that was chosen, `outer` the first that was not, `size` the largest
    of the token.
    """

    indices: Indices
    inner: Array
    outer: Array
    size: Array


class Recording:
    """What all ranks of a run recorded."""

    def __init__(self, folder: Path) -> None:
        """Read the indices.

        Raises:
            DamagedFileError: a recording is missing or damaged.

        """
        self._files = RankFiles(folder, Ended, RouteRecord)
        self.summaries = self._files.summaries
        self.records = self._files.records

    @property
    def num_steps(self) -> int:
        """How many steps all ranks have recorded."""
        return self._files.num_steps

    @property
    def num_choices(self) -> int:
        """How many choices the ranks recorded together."""
        return sum(each.num_choices for each in self.summaries.values())

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
        data = self._files.bytes(rank, record)
        indices = data[: 4 * number * k].copy().view(np.int32).reshape(number, k)
        inner, outer, size = data[4 * number * k :].copy().view(np.float64).reshape(3, number)
        return Choices(indices, inner, outer, size)

    def sample(self, rank: int, record: RouteRecord) -> Array:
        """Return the sample of what a module returned."""
        return self._files.bytes(rank, record).copy().view(np.float32).astype(np.float64)


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
