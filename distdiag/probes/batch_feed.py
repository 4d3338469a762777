"""Records the batches of a script, or puts those of a recorded run in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import dataloader

from distdiag.batch_hook import set_hook
from distdiag.parity_task import ParityTask
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.batch_leaves import UnknownBatchError, leaves, rebuild
from distdiag.probes.batch_store import BatchStore, UnequalBatchesError, write_batch
from distdiag.probes.by_identity import WeakMap
from distdiag.probes.nudge import nudged
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.recording import RecordingWriter

OWN: Final = 1_000_000
"""The number of the iterator that stands for the batches which the script makes itself."""


class Refusal(Exception):
    """The script cannot be given the batches of another run; says why."""


class BatchFeed:
    """What is between the data loaders of a script and its loop."""

    def __init__(
        self,
        task: ParityTask,
        coordinate: Callable[[], tuple[int, int]],
        refuse: Callable[[Refusal], None],
    ) -> None:
        """Feed a run.

        `coordinate` tells the data coordinate of this rank, and how many there are, when that is
        needed; `refuse` ends the run.
        """
        self._refuse = refuse
        self.num_batches = 0
        self.batch_size = 0
        self._task = task
        self._coordinate = coordinate
        self._store = BatchStore(Path(task.replayed), task.padding) if task.replayed else None
        self._loaders: WeakMap[Any, int] = WeakMap()
        self._lengths: dict[int, int] = {}
        self._iterators: WeakMap[Any, list[Any]] = WeakMap()
        self._num_iterators = 0
        self._num_own = 0

    def install(
        self,
        patches: Patches,
        writer: RecordingWriter,
        on_batch: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Put the hooks in place; `on_batch` is called when a batch is about to be handed out."""
        self._writer, self._on_batch, self._fail = writer, on_batch, fail
        kind = dataloader._BaseDataLoaderIter
        patches.wrap(kind, "__next__", self._next)
        patches.wrap(dataloader.DataLoader, "__len__", self._len)
        set_hook(self._own_batch)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the data loaders in the order of their first use, -1 where unknown."""
        return tuple(self._lengths.get(number, -1) for number in range(len(self._lengths)))

    @property
    def padded(self) -> tuple[str, ...]:
        """The parts of batches that were filled up with a value that nobody named."""
        return () if self._store is None else tuple(self._store.padded)

    # The hooks

    def _next(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_batch(self_: Any) -> Any:  # noqa: ANN401
            place = self._iterators.get(self_)
            if place is None:
                place = self._iterators[self_] = [self._num_iterators, 0, None]
                self._num_iterators += 1
            iterator, number, template = place
            place[1] += 1
            try:
                batch = original(self_)
                place[2] = batch if self._store is not None else None
            except StopIteration:
                if template is None:
                    raise
                batch = template
            return self._handed_out(batch, iterator, number)

        return next_batch

    def _own_batch(self, batch: Any) -> Any:  # noqa: ANN401
        number, self._num_own = self._num_own, self._num_own + 1
        return self._handed_out(batch, OWN, number)

    def _handed_out(self, batch: Any, iterator: int, number: int) -> Any:  # noqa: ANN401
        self._on_batch()
        try:
            with out_of_sight():
                batch = self._recorded(batch, iterator, number)
        except (UnknownBatchError, UnequalBatchesError) as error:
            self._refuse(Refusal(str(error)))
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self._fail(error)
            self._refuse(Refusal(f"{type(error).__name__} in the tool itself: {error}"))
        self.num_batches += 1
        with out_of_sight():
            self.batch_size = _batch_size(batch)
        return batch

    def _recorded(self, batch: Any, iterator: int, number: int) -> Any:  # noqa: ANN401
        if self._store is None and self._task.keeps_batches:
            write_batch(self._writer, iterator, number, batch)
        elif self._store is not None:
            batch = self._replayed(self._store, batch, iterator, number)
        if self._task.nudge is not None:
            batch = nudged(batch, self._task.nudge + number, self._task.nudge_dtype)
        return batch

    def _replayed(self, store: BatchStore, batch: Any, iterator: int, number: int) -> Any:  # noqa: ANN401
        joined = store.joined(self._share(), iterator, number)
        if joined is None:
            raise StopIteration
        return rebuild(batch, joined)

    def _share(self) -> tuple[int, ...]:
        """Return the recorded ranks whose batches this rank gets."""
        sources, (here, number) = self._task.sources, self._coordinate()
        if len(sources) % number:
            raise UnequalBatchesError(
                f"the batches of {len(sources)} data coordinates cannot be dealt out to {number}"
            )
        each = len(sources) // number
        return sources[here * each : (here + 1) * each]

    def _len(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def length(self_: Any) -> int:  # noqa: ANN401
            found = int(original(self_))
            try:
                number = self._loaders.setdefault(self_, len(self._loaders))
                self._lengths[number] = found
                if self._store is not None:
                    rank = self._task.sources[0]
                    found = self._store.length(rank, number) or found
            except Exception as error:  # noqa: BLE001 (our part must not break the user's)
                self._fail(error)
            return found

        return length


def _batch_size(batch: object) -> int:
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return 0
