"""States of torchdata's `StatefulDataLoader`: the epochs they are of, and what came of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

from distdiag.events.base import CallSite
from distdiag.events.data import LoaderResumed
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import site_here
from distdiag.probes.data.samplers import state_of
from distdiag.probes.guard import guarded
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

LOADER: Final = "torchdata.stateful_dataloader.stateful_dataloader"

_MOST_SAVES: Final = 64
"""A state that was saved longer ago counts as one of another process."""
_DEEPEST: Final = 6

_Numbers = frozenset[tuple[str, Hashable]]


class _Saved(NamedTuple):
    numbers: _Numbers
    epoch: int | None
    site: CallSite


@dataclass(slots=True)
class _Resumed:
    loader: str
    dataset: str
    epoch: int | None
    saved: tuple[_Saved, ...]
    site: CallSite
    num_batches: int = 0


class ResumedLoaders(Probe):
    """Watches the first pass of each loader that is given a state."""

    name: ClassVar[str] = "resumed-loaders"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._saves: deque[_Saved] = deque(maxlen=_MOST_SAVES)
        self._given: WeakMap[Any, tuple[_Saved, ...]] = WeakMap()
        self._epochs: WeakMap[Any, int | None] = WeakMap()
        self._passes: WeakMap[Any, _Resumed] = WeakMap()
        self._num_passes: dict[tuple[str, str], int] = {}

    def _install(self) -> None:
        module = sys.modules[LOADER]
        loader = module.StatefulDataLoader
        self._patches.wrap(loader, "state_dict", self._saving)
        self._patches.wrap(loader, "load_state_dict", self._call_after(self._loaded))
        self._patches.wrap(loader, "__iter__", self._iterating)
        self._patches.wrap(module._StatefulBaseDataLoaderIter, "__next__", self._batches)

    def _saving(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def state_dict(self_: object) -> object:
            state = original(self_)
            self._save(self_, state, sys._getframe(1))
            return state

        return state_dict

    @guarded
    def _save(self, loader: object, state: object, frame: FrameType) -> None:
        site = site_here(self.recorder, frame)
        numbers = frozenset(_numbers(state, "", _DEEPEST))
        self._saves.append(_Saved(numbers, self._epochs.get(loader), site))

    @guarded
    def _loaded(self, _: object, loader: object, state_dict: object) -> None:
        if state_dict:
            numbers = frozenset(_numbers(state_dict, "", _DEEPEST))
            self._given[loader] = tuple(each for each in self._saves if each.numbers == numbers)

    def _iterating(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def iterate(self_: object) -> object:
            iterator = original(self_)
            self._begin(self_, iterator, sys._getframe(1))
            return iterator

        return iterate

    @guarded
    def _begin(self, loader: Untyped, iterator: object, frame: FrameType) -> None:
        epoch = self._epochs[loader] = state_of(loader._index_sampler).epoch
        saved = self._given.pop(loader, None)
        self._passes.pop(iterator, None)
        if saved is not None:
            self._passes[iterator] = _Resumed(
                type(loader).__name__,
                type(loader.dataset).__name__,
                epoch,
                saved,
                site_here(self.recorder, frame),
            )

    def _batches(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_batch(self_: object) -> object:
            try:
                batch = original(self_)
            except StopIteration:
                self._end(self_)
                raise
            self._count(self_)
            return batch

        return next_batch

    @guarded
    def _count(self, iterator: object) -> None:
        mine = self._passes.get(iterator)
        if mine is not None:
            mine.num_batches += 1

    @guarded
    def _end(self, iterator: object) -> None:
        mine = self._passes.pop(iterator, None)
        if mine is None:
            return
        kind = (mine.loader, mine.dataset)
        number = self._num_passes[kind] = self._num_passes.get(kind, 0) + 1
        self.recorder.event(
            LoaderResumed,
            loader=mine.loader,
            dataset=mine.dataset,
            number=number,
            num_batches=mine.num_batches,
            epoch=mine.epoch,
            saved_epochs=tuple({each.epoch for each in mine.saved if each.epoch is not None}),
            saved_at=mine.saved[-1].site if mine.saved else None,
            site=mine.site,
        )


def _numbers(value: object, path: str, depth: int) -> Iterator[tuple[str, Hashable]]:
    """Yield the numbers in a state, which a file keeps as they are."""
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, Mapping) and depth:
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}", depth - 1)
