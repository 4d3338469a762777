"""Which samples a rank reads, in which order: what data loaders ask their samplers for.

Everything is seen in the main process, where indices are drawn whatever the number of workers.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any, ClassVar, Final, Self

import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, dataloader

from distdiag.events.base import CallSite
from distdiag.events.data import MOST_INDICES, MOST_LEAST, EpochFed, Fetch, SamplerState
from distdiag.events.models import ObjectKind
from distdiag.probes.base import AnyCallable, Probe, like, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.data.feeds import Batch, StepFeeds
from distdiag.probes.data.fetches import Fetches, fetch_site
from distdiag.probes.guard import guarded
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.out_of_sight import is_grad_enabled
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.sample_rows import fields_of, rows_of
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# What a pass over the data has trained: the parameters of the optimizer that stepped.


class Trained:
    """The parameters of one optimizer, kept by weak references: an id alone may be used again."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [weakref.ref(each) for each in parameters]

    @classmethod
    def by(cls, optimizer: object) -> Self | None:
        """Return what an optimizer trains; None: there is none, or it holds nothing."""
        held = parameters_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        return cls(held) if held else None

    def overlaps(self, other: Trained) -> bool:
        """Say whether some parameter, still alive, belongs to both."""
        mine = {id(p) for each in self._parameters if (p := each()) is not None}
        theirs = {id(p) for each in other._parameters if (p := each()) is not None}
        return not mine.isdisjoint(theirs)


def may_overlap(one: Trained | None, other: Trained | None) -> bool:
    """Say whether two passes may have trained the same; it is not known of all what they train."""
    return one is None or other is None or one.overlaps(other)


# The indices of one pass over a data set, as they go by.

_SHOWN: Final = 8
_COMPARED: Final = 64
"""The samples below this index are compared: the same ones on all ranks."""
_COMPARED_PASSES: Final = 3
"""In the second pass some come again on the same rank, and some on another one."""


class IndexStream:
    """Takes note of indices in their order; `is_opaque` if they are no numbers."""

    def __init__(self, *, keeps: bool, notes: bool = False) -> None:
        """Have seen none yet; `keeps`: remember which ones they are, `notes`: of each batch."""
        self.is_opaque = False
        self.is_ascending = True
        self.num = 0
        self.first: tuple[int, ...] = ()
        self.fetched: deque[tuple[str, int, tuple[tuple[int, int], ...]]] = deque()
        """Digests and sizes of batches that were asked for and have not been handed out yet, with
        the places and indices of those samples that are compared."""
        self._notes = notes
        self._keeps = keeps
        self._last = -1
        self._state = xxhash.xxh3_64()
        self._all = array("q")

    def add(self, index: object) -> None:
        """Take note of one index, or of those of a batch."""
        if self.is_opaque:
            return
        whole = index if isinstance(index, list | tuple) else [index]
        try:
            # The number in a tensor may lie on a device.
            has_tensor = any(issubclass(kind, torch.Tensor) for kind in set(map(type, whole)))
            batch = array("q", [] if has_tensor else whole)
        except (TypeError, OverflowError):
            self.is_opaque = True
            return
        if not batch:
            self.is_opaque = bool(whole)
            return
        content = batch.tobytes()
        self._state.update(content)
        self.num += len(batch)
        noted = [(p, i) for p, i in enumerate(batch) if 0 <= i < _COMPARED] if self._notes else ()
        self.fetched.append((xxhash.xxh3_64_hexdigest(content), len(batch), tuple(noted)))
        if self.is_ascending:
            row = [self._last, *batch]
            self.is_ascending = row == sorted(set(row))
            self._last = batch[-1]
        if len(self.first) < _SHOWN:
            self.first = (*self.first, *batch)[:_SHOWN]
        if self._keeps and self.num <= MOST_INDICES:
            self._all.extend(batch)

    @property
    def digest(self) -> str:
        """A digest of all indices in their order."""
        return self._state.hexdigest()

    def bitmap(self) -> bytes:
        """Return which indices there were, one bit for each; nothing if they are not known."""
        if len(self._all) != self.num or not self._all or min(self._all) < 0:
            return b""
        largest = max(self._all)
        if largest >= MOST_INDICES:
            return b""
        bits = bytearray(largest // 8 + 1)
        for index in self._all:
            bits[index >> 3] |= 1 << (index & 7)
        return bytes(bits)


# What samplers say of themselves, read from their attributes: nothing of theirs is called.

_INSIDE: Final = ("batch_sampler", "sampler", "base_sampler", "_sampler", "_base_sampler")
_DEEPEST: Final = 6
_NOT_ORDER: Final = ("__init__", "set_epoch", "state_dict", "load_state_dict", "__repr__")
_NAMES: Final = {
    "epoch": ("epoch", "_epoch"),
    "seed": ("seed", "initial_seed", "_seed"),
    "num_replicas": ("num_replicas", "num_processes", "world_size"),
    "replica": ("rank", "process_index"),
    "num_skipped": ("skip_batches", "start_index", "start_iter", "consumed_samples"),
}

_WORLDS: Final = (*_NAMES["num_replicas"], "world")


def chain_of(sampler: object) -> Iterator[object]:
    """Yield a sampler and those that it takes its indices from."""
    for _ in range(_DEEPEST):
        yield sampler
        inner = next((i for name in _INSIDE if (i := _own(sampler).get(name)) is not None), None)
        if inner is None:
            return
        sampler = inner


def state_of(sampler: object) -> SamplerState:
    """Return what a sampler and those inside it say of themselves."""
    chain = list(chain_of(sampler))
    found: dict[str, Any] = {field: _first_int(chain, names) for field, names in _NAMES.items()}
    found["num_skipped"] = found["num_skipped"] or 0
    shuffle = next((s for one in chain if isinstance(s := _own(one).get("shuffle"), bool)), None)
    found["uses_epoch"] = any(map(_uses_epoch, chain))
    found["dividers"] = tuple(type(one).__name__ for one in chain if _divides(one))
    return SamplerState(tuple(type(one).__name__ for one in chain), shuffle=shuffle, **found)


def _uses_epoch(sampler: object) -> bool:
    """Say whether what a sampler does to yield its indices reads an epoch, by its code."""
    for kind in type(sampler).__mro__:
        methods = [each for each in vars(kind).values() if inspect.isfunction(each)]
        names = {n for m in methods if m.__name__ not in _NOT_ORDER for n in m.__code__.co_names}
        if any("epoch" in name for name in names):
            return True
        own = vars(kind).get("__iter__")
        if (
            own is not None
            and "super" not in getattr(own, "__code__", _uses_epoch.__code__).co_names
        ):
            return False  # what its bases do plays no part
    return False


def _first_int(chain: list[object], names: tuple[str, ...]) -> int | None:
    for one in chain:
        for name in names:
            value = _own(one).get(name)
            if type(value) is int:
                return value
    return None


def _divides(one: object) -> bool:
    numbers = (_first_int([one], names) for names in (_NAMES["replica"], _WORLDS))
    return None not in numbers


def _own(one: object) -> dict[str, Any]:
    return getattr(one, "__dict__", None) or {}


# The probe of data loaders and their samplers.

_MOST_ROWS: Final = 512
_MOST_STREAMS: Final = 256
_FEWEST_DATASETS: Final = 1024
"""With fewer it is not worth looking which of them are gone."""
_LOOKED_AT: Final = 64
"""Batches after which the first ones of all workers have come, if there are no more than so many
workers."""


_MOST_SECONDS: Final = 1.0
"""Passes whose samples take longer to hash are not compared."""


class LeastDigests:
    """The least digests of all samples of a pass: whatever their order, equal samples have them.

    Those of two passes tell how much they have in common, though only some are kept.
    """

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._num = 0
        self._seconds = 0.0
        self._is_known = True

    def add(self, batch: object, size: int) -> None:
        """Take in a batch of so many samples."""
        self._num += size
        if not self._is_known:
            return
        begin = time.perf_counter()
        rows = rows_of(batch, size)
        kept = sorted([*self._kept, *rows])
        has_equal = any(one == other for one, other in pairwise(kept))
        self._seconds += time.perf_counter() - begin
        is_cheap = self._seconds <= _MOST_SECONDS
        self._is_known = len(rows) == size > 0 and is_cheap and not has_equal
        self._kept = kept[:MOST_LEAST] if self._is_known else []

    def least(self, number: int) -> tuple[str, ...]:
        """Return them if all of so many samples were looked at."""
        return tuple(self._kept) if self._num == number else ()


@dataclass(slots=True)
class _Pass:
    """One pass over a data set that is under way, or over."""

    stream: str
    number: int
    dataset: str
    num_samples: int
    sampler: SamplerState
    indices: IndexStream
    epoch_before: int | None
    num_backwards: int
    site: CallSite
    has_grad: bool
    begin: int
    iterator: Callable[[], object]
    end: int = -1
    num_batches: int = 0
    num_before_training: int = 0
    is_exhausted: bool = False
    is_over: bool = False
    trained: Trained | None = None
    contents: list[str] = field(default_factory=list)
    least: LeastDigests | None = None
    is_trained: bool = False
    fetches: tuple[Fetch, ...] = ()
    fetched_by: CallSite | None = None
    parts: tuple[tuple[str, bool], ...] = ()
    samples: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    """What is known of the passes over one stream."""

    count: int = 0
    last_digest: str = ""
    last_epoch: int | None = None
    last_trained: Trained | None = None


class SamplerProbe(Probe):
    """Writes down each pass over a data set that has indices."""

    name: ClassVar[str] = "samplers"

    def __init__(
        self,
        recorder: Recorder,
        feeds: StepFeeds,
        fetches: Fetches,
        stepping: Signal[torch.optim.Optimizer, FrameType],
        step_ended: Signal[[]],
        creations: Creations,
    ) -> None:
        """Know of no pass yet; `feeds` gets each batch, `fetches` knows what was drawn for it."""
        super().__init__(recorder)
        self._creations = creations
        self._feeds = feeds
        self._fetches = fetches
        self._stepping = stepping
        self._step_ended = step_ended
        self._stepped: weakref.ref[torch.optim.Optimizer] | None = None
        self._passes: WeakMap[Any, _Pass] = WeakMap()
        self._open: list[_Pass] = []
        self._handed_out: tuple[_Pass | None, int] = (None, 0)
        """The pass of the last batch, and how many backward passes there were before it."""
        self._streams: dict[str, _Stream] = {}
        self._datasets: dict[int, tuple[int, Callable[[], object] | None]] = {}
        self._num_datasets = 0
        self._enough = _FEWEST_DATASETS
        self._epochs: WeakMap[Any, int] = WeakMap()
        self._loaders: WeakMap[Any, weakref.ref[object]] = WeakMap()
        """The data loaders, by what gives them indices."""

    def _install(self) -> None:
        kind = dataloader._BaseDataLoaderIter
        self._patches.wrap(kind, "_next_index", self._indices)
        self._patches.wrap(kind, "__next__", self._batches)
        self._patches.wrap(kind, "_reset", self._call_before(self._restarts))
        self._patches.wrap(DataLoader, "__init__", self._making)
        self._patches.wrap(DistributedSampler, "__init__", self._making)
        self._subscribe(self._stepping, self._before_step)
        self._subscribe(self._step_ended, self._after_step)

    @guarded
    def flush(self) -> None:
        """Write down the passes that have not come to their end."""
        self._settle(all_of_them=True)

    # What data loaders do

    def _making(self, original: AnyCallable) -> AnyCallable:
        @like(original)
        def init(self_: object, *args: object, **kwargs: object) -> None:
            original(self_, *args, **kwargs)
            self._made(self_, sys._getframe(1))

        return init

    @guarded
    def _made(self, new: Untyped, frame: FrameType) -> None:
        self._creations.note(new, frame)
        if isinstance(new, DataLoader):
            # What iterates over a loader has its sampler, and not the loader.
            self._loaders[new._index_sampler] = weakref.ref(new)
            self._remember_epoch(new._index_sampler)

    def _restarts(self, iterator: object, *_: object, **__: object) -> None:
        # Loaders that keep their workers use one iterator for all passes.
        mine = self._passes.pop(iterator, None)
        if mine is not None:
            mine.is_over = True

    def _indices(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_index(self_: object) -> object:
            if self.is_off:
                return original(self_)
            self._before_index(self_, sys._getframe(1))
            index = original(self_)
            self._after_index(self_, index)
            return index

        return next_index

    def _batches(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_batch(self_: object) -> object:
            try:
                batch = original(self_)
            except StopIteration:
                self._exhausted(self_)
                raise
            self._after_batch(self_, batch)
            return batch

        return next_batch

    @guarded
    def _before_index(self, iterator: object, frame: FrameType) -> None:
        if iterator not in self._passes:
            self._begin(iterator, frame)

    @guarded
    def _after_index(self, iterator: object, index: object) -> None:
        self._passes[iterator].indices.add(index)

    @guarded
    def _after_batch(self, iterator: object, batch: object) -> None:
        mine = self._passes.get(iterator)
        if mine is None:
            return
        self._note_training()
        self._handed_out = mine, self.recorder.num_backwards
        mine.num_batches += 1
        if self.recorder.num_backwards == mine.num_backwards:
            mine.num_before_training += 1
        fetched = mine.indices.fetched
        digest, size, noted = fetched.popleft() if fetched else ("", 0, ())
        if noted:
            mine.parts, rows = fields_of(batch, size, [place for place, _ in noted])
            mine.samples += zip([index for _, index in noted], rows, strict=True)
        if mine.number == 0 and mine.num_batches <= _LOOKED_AT:
            mine.fetches = self._fetches.of(iterator)
        room = _MOST_ROWS - len(mine.contents)
        if mine.number == 0 and 0 < size <= room and mine.sampler.num_replicas:
            mine.contents += rows_of(batch, size)
        if mine.least is not None:
            mine.least.add(batch, size)
        if is_grad_enabled():
            self._feeds.after_batch(Batch(mine.stream, digest, size, mine.num_samples), batch)

    @guarded
    def _exhausted(self, iterator: Untyped) -> None:
        mine = self._passes.get(iterator)
        if mine is not None:
            mine.is_exhausted, mine.end = True, self.recorder.num_events
            self._remember_epoch(iterator._index_sampler)

    # Passes

    def _begin(self, iterator: Untyped, frame: FrameType) -> None:
        self._settle()
        sampler = iterator._index_sampler
        state = state_of(sampler)
        dataset = type(iterator._dataset).__name__
        base = f"{dataset} {self._number(iterator._dataset)} by {' of '.join(state.chain)}"
        if not is_grad_enabled():
            base += " without gradients"  # one rank may evaluate alone, with the same loader
        stream, others = base, {each.stream for each in self._open}
        while stream in others:
            stream += " beside it"
        if len(self._streams) > _MOST_STREAMS:
            self._streams.clear()
        known = self._streams.setdefault(stream, _Stream())
        mine = _Pass(
            stream=stream,
            number=known.count,
            dataset=dataset,
            num_samples=_length(iterator),
            sampler=state,
            indices=IndexStream(
                keeps=is_due(known.count),
                notes=known.count < _COMPARED_PASSES and bool(state.num_replicas),
            ),
            epoch_before=self._epoch_of(sampler),
            num_backwards=self.recorder.num_backwards,
            site=CallSite(frames_of(frame, self.recorder.main_script)),
            has_grad=is_grad_enabled(),
            begin=self.recorder.num_events,
            iterator=weakref.ref(iterator),
            fetched_by=fetch_site(iterator, self.recorder.main_script),
            least=LeastDigests() if not known.count and _may_be_part(state) else None,
        )
        known.count += 1
        loader = self._loaders.get(sampler, lambda: None)()
        if loader is not None:
            self._creations.tell(ObjectKind.LOADER, stream, loader)
        self._creations.tell(ObjectKind.SAMPLER, stream, *reversed(list(chain_of(sampler))))
        self._remember_epoch(sampler)
        self._passes[iterator] = mine
        self._open.append(mine)

    def _number(self, dataset: object) -> int:
        known = self._datasets.get(id(dataset))
        if known is None or (known[1] is not None and known[1]() is not dataset):
            try:
                reference: Callable[[], object] | None = weakref.ref(dataset)
            except TypeError:
                reference = None  # a list, for one
            if len(self._datasets) >= self._enough:
                self._forget_datasets()
            known = self._datasets[id(dataset)] = (self._num_datasets, reference)
            self._num_datasets += 1
        return known[0]

    def _forget_datasets(self) -> None:
        """Forget those that are gone."""
        self._datasets = {
            number: known
            for number, known in self._datasets.items()
            if known[1] is None or known[1]() is not None
        }
        self._enough = max(_FEWEST_DATASETS, 2 * len(self._datasets))

    def _epoch_of(self, sampler: object) -> int | None:
        return self._epochs.get(list(chain_of(sampler))[-1])

    def _remember_epoch(self, sampler: object) -> None:
        chain = list(chain_of(sampler))
        epoch = state_of(sampler).epoch
        if epoch is not None:
            self._epochs[chain[-1]] = epoch

    # Writing

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, _: FrameType) -> None:
        self._stepped = weakref.ref(optimizer)

    @guarded
    def _after_step(self) -> None:
        stepped = None if self._stepped is None else self._stepped()
        for each in self._open:
            each.trained = each.trained or Trained.by(stepped)
        if any(each.is_exhausted for each in self._open):
            self._settle()

    def _note_training(self) -> None:
        """Take note of a backward pass after the batch that was handed out last."""
        mine, num_backwards = self._handed_out
        if mine is not None and mine.has_grad and self.recorder.num_backwards > num_backwards:
            mine.is_trained = True

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Write down passes that are over: the last batch of them was used by now."""
        self._note_training()
        for mine in list(self._open):
            is_over = mine.is_exhausted or mine.is_over or mine.iterator() is None
            if is_over or all_of_them:
                self._open.remove(mine)
                self._write(mine)

    def _write(self, mine: _Pass) -> None:
        indices, known = mine.indices, self._streams.get(mine.stream, _Stream())
        if indices.is_opaque or not indices.num:
            return
        num_backwards = self.recorder.num_backwards - mine.num_backwards if mine.has_grad else 0
        self.recorder.event(
            EpochFed,
            stream=mine.stream,
            number=mine.number,
            dataset=mine.dataset,
            num_samples=mine.num_samples,
            sampler=mine.sampler,
            num_indices=indices.num,
            num_batches=mine.num_batches,
            digest=indices.digest,
            first=indices.first,
            indices=indices.bitmap(),
            contents=tuple(mine.contents),
            is_complete=mine.is_exhausted,
            is_ascending=indices.is_ascending,
            last_digest=known.last_digest if may_overlap(mine.trained, known.last_trained) else "",
            last_epoch=known.last_epoch,
            epoch_before=mine.epoch_before,
            num_before_training=mine.num_before_training,
            num_backwards=num_backwards,
            members=self._feeds.members if num_backwards else (),
            site=mine.site,
            begin=mine.begin,
            end=mine.end,
            is_trained=mine.is_trained,
            fetches=mine.fetches,
            fetched_by=mine.fetched_by,
            parts=mine.parts,
            samples=tuple(mine.samples),
            least=mine.least.least(indices.num) if mine.least and mine.is_exhausted else (),
        )
        if num_backwards:
            known.last_trained = mine.trained
            known.last_digest = indices.digest if mine.is_exhausted else ""
            known.last_epoch = mine.sampler.epoch


def _may_be_part(state: SamplerState) -> bool:
    """Say whether a data set may be a rank's own part: nothing divides it by indices."""
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    return is_shared and is_grad_enabled() and not state.num_replicas


def _length(iterator: Untyped) -> int:
    """Return how many samples there are, -1 if the data set does not say."""
    if iterator._dataset_kind == dataloader._DatasetKind.Iterable:
        return -1
    with Guard(lambda _: None):  # the code is the user's, and may raise anything
        return len(iterator._dataset)
    return -1
