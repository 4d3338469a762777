"""Which tensors torch's context parallelism cuts, so that each rank has a part of them."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.distributed.tensor import experimental

from distdiag.probes.base import Probe
from distdiag.probes.guard import guarded
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
            self._patches.wrap_everywhere(
                experimental, "context_parallel", self._call_before(self._tell)
            )

    @guarded
    def _tell(self, /, mesh: object = None, *_: object, buffers: object = (), **__: object) -> None:
        # An iterator would be spent when torch comes to it.
        self._cut.emit(mesh, buffers if isinstance(buffers, (list, tuple)) else ())
