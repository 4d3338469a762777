"""Which tensors torch's context parallelism cuts, so that each rank has a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.distributed.tensor import experimental

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guard
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class SequenceBuffers(Probe):
    """Tells of the mesh and the buffers that `context_parallel` is given."""

    name: ClassVar[str] = "sequence-buffers"

    def __init__(self, recorder: Recorder, cut: Signal[object, Sequence[torch.Tensor]]) -> None:
        super().__init__(recorder)
        self._cut = cut

    def _install(self) -> None:
        original = getattr(experimental, "context_parallel", None)
        if original is not None:
            self._patches.wrap_everywhere(experimental, "context_parallel", self._telling)

    def _telling(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def context_parallel(*args: object, **kwargs: object) -> object:
            if not self.is_off:
                with guard(self.fail):
                    buffers = kwargs.get("buffers")
                    # An iterator would be spent when torch comes to it.
                    known = buffers if isinstance(buffers, (list, tuple)) else ()
                    self._cut.emit(kwargs.get("mesh", args[0] if args else None), known)
            return original(*args, **kwargs)

        return context_parallel
