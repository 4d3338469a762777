"""What a rank is busy with beside forward, backward and step: data, checkpoints, compilation."""

from __future__ import annotations

from types import FrameType
from typing import ClassVar

import torch
from torch.utils.data import dataloader

from distdiag.events.base import Phase
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import caller
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class DataLoaderProbe(Probe):
    """Counts the batches, and says when a rank waits for one."""

    name: ClassVar[str] = "dataloader"

    def _install(self) -> None:
        kind = dataloader._BaseDataLoaderIter
        self._patches.wrap(kind, "__next__", self._wrapper)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_batch(self_: object) -> object:
            if self.is_off:
                return original(self_)
            recorder = self.recorder
            before = self._enter(Phase.DATALOADER)
            try:
                batch = original(self_)
            except BaseException:
                self._enter(before)
                raise
            recorder.num_batches += 1
            self._enter(Phase.FORWARD)
            self._show_progress()
            return batch

        return next_batch


class _SavePhase(Probe):
    """Says when a rank saves or loads."""

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def function(*args: object, **kwargs: object) -> object:
            if self.is_off:
                return original(*args, **kwargs)
            before = self._enter(Phase.CHECKPOINT)
            try:
                return original(*args, **kwargs)
            finally:
                self._enter(before)

        return function


class SaveProbe(_SavePhase):
    """Says when a rank is in `torch.save` or `torch.load`."""

    name: ClassVar[str] = "save"

    def __init__(self, recorder: Recorder, saving: Signal[object, FrameType]) -> None:
        super().__init__(recorder)
        self._saving = saving

    def _install(self) -> None:
        here = torch.serialization
        self._patches.wrap_everywhere(here, "load", self._wrapper)
        self._patches.wrap_everywhere(here, "save", lambda f: self._wrapper(self._telling(f)))

    def _telling(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def save(*args: object, **kwargs: object) -> object:
            if self._saving.subscribers:
                self._saving.emit(args[0] if args else kwargs.get("obj"), caller(2))
            return original(*args, **kwargs)

        return save


class CheckpointProbe(_SavePhase):
    """Says when a rank is in a distributed checkpoint."""

    name: ClassVar[str] = "checkpoint"

    def _install(self) -> None:
        from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

        self._patches.wrap_everywhere(state_dict_saver, "save", self._wrapper)
        self._patches.wrap_everywhere(state_dict_saver, "async_save", self._wrapper)
        self._patches.wrap_everywhere(state_dict_loader, "load", self._wrapper)


class CompileProbe(Probe):
    """Says when a rank compiles, which may take minutes while its peers wait."""

    name: ClassVar[str] = "compile"

    def _install(self) -> None:
        from torch._dynamo.callback import CompilationCallbackHandler as Handler

        # Patched, not registered as callbacks: `torch._dynamo.reset` forgets those.
        self._before = Phase.SCRIPT
        self._patches.wrap(Handler, "run_start_callbacks", self._call_before(self._start))
        self._patches.wrap(Handler, "run_end_callbacks", self._call_before(self._end))

    def _start(self, *_: object, **__: object) -> None:
        self._before = self._enter(Phase.COMPILE)

    def _end(self, *_: object, **__: object) -> None:
        self._enter(self._before)
