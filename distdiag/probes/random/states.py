"""In which states the random number generators of a rank are; reading them draws nothing."""

import sys
from typing import Any, ClassVar

from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import Moment
from distdiag.events.random import RandomState
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.generators import generator_states
from distdiag.probes.guard import guarded
from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.models.wrappers import is_wrapped
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class RandomStates(Probe):
    """Writes the states down when a model begins, and before some of the steps."""

    name: ClassVar[str] = "random-states"

    def __init__(
        self,
        recorder: Recorder,
        model_started: Signal[nn.Module],
        step_ended: Signal[[]] | None = None,
    ) -> None:
        """Know of no model yet; without `step_ended` the optimizer steps are left out."""
        super().__init__(recorder)
        self._model_started = model_started
        self._step_ended = step_ended
        self._members: tuple[int, ...] = ()

    def _install(self) -> None:
        self._subscribe(self._model_started, self._at_start)
        if self._step_ended is not None:
            self._subscribe(self._step_ended, self._after_step)

    @guarded
    def _at_start(self, root: nn.Module) -> None:
        self._look(Moment.START, root)

    def _after_step(self) -> None:
        if is_due(self.recorder.step):
            self._look_at_step()

    @guarded
    def _look_at_step(self) -> None:
        self._look(Moment.STEP)

    def _look(self, moment: Moment, root: nn.Module | None = None) -> None:
        if root is not None:
            self._members = sharing_ranks(root) or self._members
        self.recorder.event(
            RandomState,
            moment=moment,
            generators=tuple(generator_states()),
            members=self._members,
            site=CallSite(frames_of(sys._getframe(1), self.recorder.main_script)),
        )


def sharing_ranks(root: nn.Module) -> tuple[int, ...]:
    """Return the ranks that compute on the same activations, if dropout draws for them."""
    has_dropout = any(
        isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in root.modules()
    )
    if not has_dropout or is_wrapped(root):
        return ()
    for parameter in root.parameters():
        if is_dtensor(parameter):
            tensor: Any = parameter
            if tensor.device_mesh.ndim == 1 and any(p.is_shard() for p in tensor.placements):
                return mesh_of(tensor.device_mesh).ranks
    return ()
