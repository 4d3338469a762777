"""Batches that the ranks of a run recorded, joined for a run on fewer ranks."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from distdiag.parity_task import RankSummary, read_summary
from distdiag.probes.batch_leaves import leaves
from distdiag.recording import Kind, Record, RecordingWriter, read_index

PADDING: Final[Mapping[str, float]] = {"labels": -100, "label": -100, "targets": -100}
"""What fills up batches of unequal lengths, by name; other names get zeros."""


class UnequalBatchesError(Exception):
    """The batches of the ranks cannot be joined into one."""


def write_batch(writer: RecordingWriter, iterator: int, number: int, batch: object) -> None:
    """Record the leaves of batch `number` of an iterator."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            local = leaf.detach().cpu().contiguous()
            record = Record(
                Kind.BATCH,
                iterator,
                number,
                path,
                dtype=str(local.dtype).removeprefix("torch."),
                shape=tuple(local.shape),
            )
            writer.write(record, bytes_of(local))
        else:
            values = tuple(leaf) if isinstance(leaf, list | tuple) else (leaf,)
            shape = (len(values),) if isinstance(leaf, list | tuple) else ()
            kind = type(leaf).__name__
            record = Record(Kind.BATCH, iterator, number, path, kind, shape, values=values)
            writer.write(record)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class BatchStore:
    """The recorded batches of some ranks."""

    def __init__(self, folder: Path, padding: Mapping[str, float]) -> None:
        """Read what is there; `padding` overrules what fills up unequal lengths."""
        self._padding = {**PADDING, **padding}
        self._named = padding.keys()
        self.padded: dict[str, None] = {}
        """The paths of what was filled up with a value that nobody named."""
        self._folder = folder
        self._batches: dict[int, dict[tuple[int, int], dict[str, Record]]] = {}
        self._data: dict[int, mmap.mmap] = {}
        self.summaries: dict[int, RankSummary] = {}

    def _rank(self, rank: int) -> dict[tuple[int, int], dict[str, Record]]:
        if rank not in self._batches:
            batches: dict[tuple[int, int], dict[str, Record]] = {}
            for record in read_index(self._folder / f"rank-{rank}.index"):
                if record.kind is Kind.BATCH:
                    place = (record.step, record.micro)
                    batches.setdefault(place, {})[record.name] = record
            self._batches[rank] = batches
            summary = (self._folder / f"rank-{rank}.json").read_bytes()
            self.summaries[rank] = read_summary(summary)
        return self._batches[rank]

    def length(self, rank: int, loader: int) -> int | None:
        """Return what the length of a data loader was on a rank."""
        self._rank(rank)
        lengths = self.summaries[rank].lengths
        return lengths[loader] if loader < len(lengths) and lengths[loader] >= 0 else None

    def joined(self, ranks: Sequence[int], iterator: int, number: int) -> dict[str, Any] | None:
        """Return the leaves of a batch of several ranks as one; None if one of them had none.

        Raises:
            UnequalBatchesError: they do not fit together.

        """
        parts = [self._rank(rank).get((iterator, number)) for rank in ranks]
        if not parts or any(part is None for part in parts):
            return None
        found = [part for part in parts if part is not None]
        if len({frozenset(part) for part in found}) > 1:
            raise UnequalBatchesError(f"batch {number} has other parts on some ranks")
        joined = {
            path: self._joined_leaf(path, [part[path] for part in found], ranks)
            for path in found[0]
        }
        if not any(_tells_padding(path) for path in joined):
            self.padded.update(
                dict.fromkeys(
                    path
                    for path in joined
                    if _last(path) not in self._named and _is_ragged([p[path] for p in found])
                )
            )
        return joined

    def _joined_leaf(self, path: str, records: Sequence[Record], ranks: Sequence[int]) -> Any:  # noqa: ANN401
        first = records[0]
        if first.values is not None:
            return _joined_values(path, records)
        tensors = [self._tensor(rank, each) for rank, each in zip(ranks, records, strict=True)]
        if not first.shape:
            if any(not torch.equal(tensors[0], tensor) for tensor in tensors):
                raise UnequalBatchesError(f"{path} is one number, and another one on some ranks")
            return tensors[0]
        return torch.cat(self._padded(path, tensors))

    def _padded(self, path: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len({tensor.ndim for tensor in tensors}) > 1:
            raise UnequalBatchesError(f"{path} has another number of dimensions on some ranks")
        sizes = [
            max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)
        ]
        fill = self._padding.get(_last(path), 0)
        padded = []
        for tensor in tensors:
            if list(tensor.shape[1:]) != sizes:
                room = tensor.new_full((tensor.shape[0], *sizes), fill)
                room[tuple(slice(0, size) for size in tensor.shape)] = tensor
                tensor = room
            padded.append(tensor)
        return padded

    def _tensor(self, rank: int, record: Record) -> torch.Tensor:
        kind = getattr(torch, record.dtype)
        if not record.num_bytes:
            return torch.empty(record.shape, dtype=kind, device="cpu")
        if rank not in self._data:
            with (self._folder / f"rank-{rank}.data").open("rb") as file:
                self._data[rank] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = bytearray(self._data[rank][record.place : record.place + record.num_bytes])
        return torch.frombuffer(data, dtype=kind).reshape(record.shape)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _tells_padding(path: str) -> bool:
    """Say whether a part of a batch tells by its name which elements count."""
    return _last(path) in PADDING or "mask" in _last(path)


def _is_ragged(records: Sequence[Record]) -> bool:
    """Say whether tensors differ in what is no dimension of samples."""
    return records[0].values is None and len({record.shape[1:] for record in records}) > 1


def _joined_values(path: str, records: Sequence[Record]) -> Any:  # noqa: ANN401
    first = records[0]
    if first.shape:
        values = [value for record in records for value in record.values or ()]
        return tuple(values) if first.dtype == "tuple" else values
    if len({record.values for record in records}) > 1:
        raise UnequalBatchesError(f"{path} is one value, and another one on some ranks")
    return (first.values or (None,))[0]
