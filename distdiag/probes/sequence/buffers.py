"""Which tensors torch's context parallelism cuts, so that each rank has a part of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import experimental

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.tensors.by_identity import WeakMembers


class SequenceBuffers(Probe):
    """Remembers the buffers that `context_parallel` is given: it resizes them in place."""

    name: ClassVar[str] = "sequence-buffers"

    def _install(self) -> None:
        self._cut: WeakMembers[torch.Tensor] = WeakMembers()
        original = getattr(experimental, "context_parallel", None)
        if original is not None:
            self._patches.wrap_everywhere(experimental, "context_parallel", self._noting)
            self.recorder.is_cut = self._cut.__contains__

    def _noting(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def context_parallel(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not self.is_off:
                with guard(self.fail):
                    self.recorder.cutting_mesh = kwargs.get("mesh", args[0] if args else None)
                    self._note(kwargs.get("buffers") or ())
            return original(*args, **kwargs)

        return context_parallel

    def _note(self, buffers: Iterable[torch.Tensor]) -> None:
        # An iterator would be spent when torch comes to it.
        for buffer in buffers if isinstance(buffers, (list, tuple)) else ():
            self._cut.add(buffer)
