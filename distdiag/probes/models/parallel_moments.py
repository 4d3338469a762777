"""When a model is made tensor-parallel: it begins anew, as another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch.distributed.tensor.parallel import api

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class ParallelMoments(Probe):
    """Tells whoever looks at models that `parallelize_module` has changed one."""

    name: ClassVar[str] = "parallel-moments"

    def __init__(self, recorder: Recorder, wrapped: Signal[Sequence[nn.Module]]) -> None:
        """Tell by this signal."""
        super().__init__(recorder)
        self._wrapped = wrapped

    def _install(self) -> None:
        self._patches.wrap_everywhere(api, "parallelize_module", self._telling)

    def _telling(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def parallelize_module(module: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
            result = original(module, *args, **kwargs)
            if not self.is_off:
                self._wrapped.emit((module,))
            return result

        return parallelize_module
