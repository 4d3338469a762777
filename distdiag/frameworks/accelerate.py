"""Rows of a last batch that was filled up, gathered with Accelerate in a pass without training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from types import FrameType
from typing import Any, ClassVar, Final

import torch

from distdiag.events.base import CallSite
from distdiag.events.data import RowsGathered
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.record.recorder import Recorder

ACCELERATOR: Final = "accelerate.accelerator"
DATA_LOADER: Final = "accelerate.data_loader"

_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class _Gathered:
    """One call that gathered rows of the last batch as they are."""

    name: str
    num_rows: int
    num_real: int
    tensors: tuple[str, ...]
    site: CallSite


@dataclass(slots=True)
class _Pass:
    """A pass of a prepared loader; whether it trains is known when it is over."""

    num_backwards: int
    dataset: str
    num_samples: int
    gathered: list[_Gathered] = field(default_factory=list)
    drops: bool = False


class EvaluationGathers(Probe):
    """Watches `gather` and `gather_for_metrics`, the first of which keeps what fills a batch up."""

    name: ClassVar[str] = "evaluation-gathers"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._passes: WeakMap[Any, _Pass] = WeakMap()
        self._reported: set[str] = set()
        self._depth = 0

    def _install(self) -> None:
        kind = getattr(sys.modules[ACCELERATOR], "Accelerator", None)
        state = getattr(sys.modules[DATA_LOADER], "DataLoaderStateMixin", None)
        for name, tell in (("begin", self._begins), ("end", self._ends)):
            self._patches.wrap(state, name, partial(self._moves, tell=tell))
        # The second is made of the first, which alone would be taken for what the program calls.
        if self._patches.wrap(
            kind, "gather_for_metrics", partial(self._gathers, after=self._drops)
        ):
            self._patches.wrap(kind, "gather", partial(self._gathers, after=self._keeps))

    def flush(self) -> None:
        """Write down what passes without an end have gathered."""
        for loader in list(self._passes):
            self._ends(loader)

    def _gathers(self, original: AnyCallable, after: Callable[..., None]) -> AnyCallable:
        @wrap_like(original)
        def gather(*args: object, **kwargs: object) -> object:
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:  # the one that drops is made of the one that keeps
                after(args, kwargs, sys._getframe(1))
            return result

        return gather

    def _moves(self, original: AnyCallable, tell: Callable[[Any], None]) -> AnyCallable:
        @wrap_like(original)
        def move(self_: object, *args: object, **kwargs: object) -> object:
            result = original(self_, *args, **kwargs)
            tell(self_)
            return result

        return move

    @guarded
    def _begins(self, loader: object) -> None:
        self._ends(loader)
        dataset = getattr(loader, "dataset", None)
        try:
            num_samples = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            return
        kind = type(dataset).__name__
        self._passes[loader] = _Pass(self.recorder.num_backwards, kind, num_samples)

    @guarded
    def _drops(self, args: tuple[Any, ...], _: Mapping[str, Any], __: FrameType) -> None:
        loader = args[0].gradient_state.active_dataloader if args else None
        if loader in self._passes:
            self._passes[loader].drops = True

    @guarded
    def _keeps(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType) -> None:
        if not args:
            return
        accelerator, state = args[0], args[0].gradient_state
        loader, given = state.active_dataloader, args[1] if len(args) > 1 else kwargs.get("tensor")
        mine = self._passes.get(loader) if loader is not None else None
        if mine is None or not state.end_of_dataloader or not _is_filled_up(loader):
            return
        num_rows, num_real = loader.total_batch_size, state.remainder
        if not 0 < num_real < num_rows or len(mine.gathered) >= _MOST:
            return
        if mine.num_backwards != self.recorder.num_backwards:
            return
        tensors = tuple(
            f"{str(each.dtype).removeprefix('torch.')} {' x '.join(map(str, each.shape))}"
            for each in _leaves(given)
            if each.ndim
            and each.shape[0] > 1
            and each.shape[0] * accelerator.num_processes == num_rows
        )
        if tensors:
            name = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} {mine.dataset}"
            site = CallSite(frames_of(frame, self.recorder.main_script))
            mine.gathered.append(_Gathered(name, num_rows, num_real, tensors, site))

    @guarded
    def _ends(self, loader: object) -> None:
        mine = self._passes.pop(loader, None)
        if mine is None or mine.num_backwards != self.recorder.num_backwards:
            return
        for each in mine.gathered:
            if each.name not in self._reported:
                self._reported.add(each.name)
                self.recorder.event(
                    RowsGathered,
                    name=each.name,
                    number=0,
                    dataset=mine.dataset,
                    num_samples=mine.num_samples,
                    num_rows=each.num_rows,
                    num_real=each.num_real,
                    tensors=each.tensors,
                    is_dropped_elsewhere=mine.drops,
                    site=each.site,
                )


def _is_filled_up(loader: object) -> bool:
    """Say whether its last batch is filled up with samples from the beginning."""
    sampler = getattr(loader, "batch_sampler", None)
    return bool(getattr(sampler, "even_batches", False)) and not getattr(
        sampler, "drop_last", False
    )


def _leaves(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _leaves(each)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)
