"""One recorded run, read tensor by tensor: what its ranks hold, put together."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from distdiag.config.tasks import RankSummary
from distdiag.events.ranks import RankSet
from distdiag.parity.rank_files import UNIT, Array, Bytes, RankFiles, Recorded
from distdiag.record.recording import Kind, Record

Place = tuple[Kind, int, int, str]


class Spot(NamedTuple):
    """Where a part belongs: the name and shape of the whole, and where in it the part begins."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]


_UNLIKE: Final = 1e-3


_OF_PARAMETERS: Final = frozenset({Kind.START, Kind.GRADIENT, Kind.PARAMETER})


class RecordedRun:
    """The recordings of all ranks of a run."""

    def __init__(self, folder: Path, label: str) -> None:
        """Read the indices; `label` names the run in what is said of it.

        Raises:
            DamagedFileError: a recording is missing or damaged.

        """
        self.label = label
        self._records: dict[Place, dict[int, Record]] = {}
        self._names: dict[tuple[Kind, int, int], list[str]] = {}
        self._files = RankFiles(folder, RankSummary, Record)
        self.summaries = self._files.summaries
        for rank, recorded in self._files.records.items():
            for record in recorded:
                place = (record.kind, record.step, record.micro, record.name)
                if place not in self._records:
                    self._names.setdefault(place[:3], []).append(record.name)
                self._records.setdefault(place, {})[rank] = record

    def with_parts_at(self, spots: Mapping[tuple[int, str], Spot]) -> RecordedRun:
        """Return this run as if its ranks had recorded their parts as those of the whole."""
        run = copy.copy(self)
        run._records, run._names = {}, {}
        for place, by_rank in self._records.items():
            for rank, record in by_rank.items():
                spot = spots.get((rank, record.name)) if place[0] in _OF_PARAMETERS else None
                moved = record if spot is None else _moved(record, spot)
                new = (*place[:3], moved.name)
                if new not in run._records:
                    run._names.setdefault(new[:3], []).append(moved.name)
                run._records.setdefault(new, {})[rank] = moved
        return run

    @property
    def num_steps(self) -> int:
        """How many steps all ranks have recorded."""
        return self._files.num_steps

    @property
    def compute_dtype(self) -> str:
        """The coarsest dtype that anything was rounded to, empty if nothing is known."""
        names = {summary.compute_dtype for summary in self.summaries.values()} & UNIT.keys()
        return max(names, key=UNIT.__getitem__, default="")

    @property
    def compute_unit(self) -> float:
        """The unit of rounding of the coarsest dtype that was computed in, 0 if not known."""
        return UNIT.get(self.compute_dtype, 0.0)

    @property
    def problem(self) -> str:
        """Why a rank could not record, empty if all could."""
        return next((s.problem for s in self.summaries.values() if s.problem), "")

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each data coordinate; those of one coordinate got the same batches."""
        groups = {rank: summary.data_group for rank, summary in self.summaries.items()}
        with_data = [
            rank for rank, each in self.summaries.items() if each.num_batches + each.num_given
        ]
        if not with_data:
            # Nothing says who sees the same samples; a mean over all ranks is right either way.
            return tuple((rank,) for rank in groups)
        if any(not groups[rank] for rank in with_data):
            return self._alike_by_content(with_data)
        found: dict[int, list[int]] = {}
        for rank in with_data:
            found.setdefault(groups[rank].index(rank), []).append(rank)
        # Ranks in the same place of several groups got the same batches, or the groups are too
        # small: then their data is none of one another's.
        together = (
            self._alike_by_content(ranks) if len(ranks) > 1 else ((ranks[0],),)
            for _, ranks in sorted(found.items())
        )
        return self._with_parts([ranks for each in together for ranks in each])

    def _with_parts(self, coordinates: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Join those that make other losses of the same batches: each has a part of them.

        A wrapper over all ranks counts the ranks that share a sequence as data-parallel ones too.
        """
        found: dict[bytes, list[tuple[int, ...]]] = {}
        digests = {ranks: self._digest_of_batches(ranks[0]) for ranks in coordinates}
        for ranks, digest in digests.items():
            found.setdefault(digest, []).append(ranks)
        joined: dict[tuple[int, ...], None] = {}
        for ranks, digest in digests.items():
            alike = found[digest]
            together = tuple(sorted(rank for each in alike for rank in each))
            joined[together if self.unlike_losses(together) else ranks] = None
        return tuple(joined)

    def unlike_losses(self, ranks: Iterable[int]) -> bool:
        """Say whether these ranks began with losses that rounding does not make of each other."""
        records = self.by_rank(Kind.LOSS, 0, 0, "loss")
        values = [float(records[rank].values[0]) for rank in ranks if rank in records]  # type: ignore
        return bool(values) and max(values) - min(values) > _UNLIKE * max(map(abs, values))

    def _alike_by_content(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        found: dict[bytes, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._digest_of_batches(rank), []).append(rank)
        return tuple(map(tuple, sorted(found.values())))

    def _digest_of_batches(self, rank: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for place, by_rank in self._records.items():
            if place[0] is Kind.BATCH and rank in by_rank:
                digest.update(self._files.bytes(rank, by_rank[rank]).tobytes())
                digest.update(repr(by_rank[rank].values).encode())
        return digest.digest()

    def names(self, kind: Kind, step: int, micro: int = 0) -> list[str]:
        """Return the names of what was recorded then, in order."""
        return list(self._names.get((kind, step, micro), ()))

    def places(self, kind: Kind) -> list[Place]:
        """Return where there are records of a kind, in order."""
        return [place for place in self._records if place[0] is kind]

    def by_rank(self, kind: Kind, step: int, micro: int, name: str) -> Mapping[int, Record]:
        """Return the records of all ranks of one quantity."""
        return self._records.get((kind, step, micro, name), {})

    def num_micro(self, step: int) -> int:
        """Return how many backward passes a step had."""
        counts = (s.num_microsteps for s in self.summaries.values())
        return min((count[step] for count in counts if step < len(count)), default=0)

    def unit(self, kind: Kind, step: int, name: str) -> float:
        """Return the unit of rounding of a quantity."""
        records = self.by_rank(kind, step, 0, name)
        dtype = next((record.dtype for record in records.values()), "float32")
        return UNIT.get(dtype, UNIT["float32"])

    def whole(self, kind: Kind, step: int, name: str, micro: int = 0) -> Array | None:
        """Put a tensor together from the parts of all ranks; None if there is not all of it."""
        found = self.as_recorded(kind, step, name, micro)
        return None if found is None else found.astype(np.float64)

    def as_recorded(
        self, kind: Kind, step: int, name: str, micro: int = 0, among: Collection[int] = ()
    ) -> Recorded | None:
        """Do the same without another copy of a tensor that one rank holds wholly.

        With `among` only the parts of these ranks.
        """
        records = self.by_rank(kind, step, micro, name)
        if among:
            records = {rank: record for rank, record in records.items() if rank in among}
        parts = {rank: record for rank, record in records.items() if record.num_bytes}
        if not parts:
            return None
        shape = next(iter(parts.values())).shape
        if any(record.shape != shape for record in records.values()):
            return None
        if any(record.part == shape for record in parts.values()):
            rank = min(rank for rank, record in parts.items() if record.part == shape)
            return self._numbers(rank, parts[rank])
        arrays = {rank: self._numbers(rank, record) for rank, record in parts.items()}
        whole = np.full(shape, np.nan, np.result_type(*{each.dtype for each in arrays.values()}))
        for rank, record in parts.items():
            where = tuple(slice(a, a + n) for a, n in zip(record.at, record.part, strict=True))
            whole[where] = arrays[rank]
        return None if sum(_sizes(parts.values())) < math.prod(shape) else whole

    def digest(self, kind: Kind, step: int, name: str) -> str:
        """Return the digest of a tensor that ranks recorded wholly and alike, else an empty one."""
        parts = [each for each in self.by_rank(kind, step, 0, name).values() if each.num_bytes]
        digests = {each.digest if each.part == each.shape else "" for each in parts}
        return digests.pop() if len(digests) == 1 else ""

    def array(self, rank: int, record: Record) -> Array:
        """Return the part of a tensor that one rank recorded."""
        return self._numbers(rank, record).astype(np.float64)

    def _numbers(self, rank: int, record: Record) -> Recorded:
        return _numbers(self._files.bytes(rank, record), record)

    def rows(self, rank: int, record: Record) -> list[bytes]:
        """Return the bytes of each sample of a recorded batch tensor."""
        if not record.shape or not record.num_bytes:
            return []
        size = record.num_bytes // record.shape[0]
        data = self._files.bytes(rank, record).tobytes()
        return [data[place : place + size] for place in range(0, len(data), size)]

    def repeats(
        self,
        other: RecordedRun,
        kinds: Collection[Kind] = (Kind.LOSS, Kind.GRADIENT, Kind.PARAMETER),
    ) -> bool:
        """Say whether losses, gradients and parameters are those of another run, to the bit."""
        return all(
            _held(records) == _held(other._records.get(place, {}))
            for place, records in self._records.items()
            if place[0] in kinds
        )

    def differing_replicas(
        self, kind: Kind, step: int, *, is_kept: bool = False
    ) -> dict[str, dict[str, RankSet]]:
        """Return the tensors of which ranks recorded unlike copies: the ranks by content.

        With `is_kept` only those that a wrapper keeps alike.
        """
        found = {}
        for place, records in self._records.items():
            if place[:2] != (kind, step):
                continue
            if is_kept and not all(record.is_kept for record in records.values()):
                continue
            groups: dict[tuple[object, ...], dict[str, list[int]]] = {}
            for rank, record in records.items():
                by_digest = groups.setdefault((record.at, record.part), {})
                by_digest.setdefault(record.digest, []).append(rank)
            for by_digest in groups.values():
                if len(by_digest) > 1:
                    found[place[3]] = {key: RankSet(ranks) for key, ranks in by_digest.items()}
        return found


def _numbers(data: Bytes, record: Record) -> Recorded:
    shape = record.part or record.shape
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


def _moved(record: Record, spot: Spot) -> Record:
    at = tuple(a + b for a, b in zip(spot.at, record.at, strict=True))
    return msgspec.structs.replace(record, name=spot.name, shape=spot.shape, at=at)


def _held(records: Mapping[int, Record]) -> dict[int, tuple[object, ...]]:
    return {rank: (record.digest, record.values) for rank, record in records.items()}


def _sizes(records: Iterable[Record]) -> Iterable[int]:
    distinct = {(record.at, record.part) for record in records}
    return (math.prod(part) for _, part in distinct)
