"""Recordings as ranks would write them, made of numpy arrays."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from distdiag.config.tasks import RankSummary
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind, Record, RecordingWriter


class Rank:
    """Writes the recording of one rank."""

    def __init__(self, folder: Path, rank: int, **summary):
        self.rank, self.summary = rank, {"num_batches": 1, **summary}
        self.writer = RecordingWriter(folder, rank)

    def tensor(  # noqa: PLR0913 (as many as a record has parts)
        self, kind, step, name, array, *, whole=None, at=None, writes=True, is_kept=False, among=()
    ):
        array = np.asarray(array, dtype=np.float32)
        shape = tuple(whole or array.shape)
        data = array.tobytes()
        record = Record(
            kind,
            step,
            0,
            name,
            dtype="float32",
            shape=shape,
            at=tuple(at or (0,) * array.ndim),
            part=array.shape,
            digest=xxhash.xxh3_128_hexdigest(data),
            is_kept=is_kept,
            among=among,
        )
        self.writer.write(record, data if writes else b"")

    def values(self, kind, step, name, *values, micro=0):
        self.writer.write(Record(kind, step, micro, name, "float32", values=values))

    def batch(self, iterator, number, name, array):
        array = np.asarray(array)
        record = Record(Kind.BATCH, iterator, number, name, str(array.dtype), array.shape)
        self.writer.write(record, array.tobytes())

    def close(self, num_steps, world_size):
        summary = {"num_microsteps": (1,) * num_steps, **self.summary}
        self.writer.close(
            RankSummary(rank=self.rank, world_size=world_size, num_steps=num_steps, **summary)
        )


def run_of(
    folder: Path,
    label: str,
    ranks: Sequence[Mapping],
    *,
    num_steps: int = 1,
    **summary,
) -> RecordedRun:
    """Return a run whose ranks each have gradients, parameters and losses of one linear layer.

    Each of `ranks` has `loss`, `gradient`, `start` and `update`, the same at every step.
    """
    for rank, held in enumerate(ranks):
        writer = Rank(folder, rank, **summary)
        start = np.asarray(held["start"], np.float32)
        writer.tensor(Kind.START, 0, "Net/weight", start, writes=rank == 0)
        for step in range(num_steps):
            writer.values(Kind.LOSS, step, "loss", held["loss"])
            writer.tensor(Kind.GRADIENT, step, "Net/weight", held["gradient"], writes=rank == 0)
            after = start + (step + 1) * np.asarray(held["update"], np.float32)
            writer.tensor(Kind.PARAMETER, step, "Net/weight", after, writes=rank == 0)
            writer.values(Kind.RATE, step, "rates", held.get("rate", 0.1))
        writer.close(num_steps, len(ranks))
    return RecordedRun(folder, label)
