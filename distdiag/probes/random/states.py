"""In which states the random number generators of a rank are; reading them draws nothing."""

import random
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import xxhash
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import Moment
from distdiag.events.random import GeneratorState, RandomState
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.models.wrappers import is_wrapped
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_MASK = (1 << 63) - 1


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

    @guarded
    def _after_step(self) -> None:
        if is_due(self.recorder.step):
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


def generator_states() -> Iterator[GeneratorState]:
    """Yield the default generators of this process."""
    cpu = torch.default_generator
    digest = digest_of(cpu.get_state())
    if digest:
        yield GeneratorState("cpu", digest, cpu.initial_seed() & _MASK)
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and not torch.cuda.is_current_stream_capturing():
        # Its state is kept by the host: nothing waits for the device.
        cuda = torch.cuda.default_generators[torch.cuda.current_device()]
        digest = digest_of(cuda.get_state())
        if digest:
            yield GeneratorState("cuda", digest, cuda.initial_seed() & _MASK)
    yield GeneratorState("python", _digest(repr(random.getstate()).encode()))
    if "numpy.random" in sys.modules:
        state = sys.modules["numpy.random"].get_state(legacy=False)
        yield GeneratorState("numpy", _digest(repr(sorted(_plain(state))).encode()))


def _plain(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield key, repr(sorted(_plain(value)))
        else:
            # The repr of a long array leaves out its middle.
            yield key, repr(value.tolist() if hasattr(value, "tolist") else value)


def digest_of(state: object) -> str:
    """Return the digest of a state of torch, an empty string if it is no plain tensor."""
    if type(state) is not torch.Tensor or state.device.type != "cpu":
        return ""  # under tracing
    return _digest(state.numpy().tobytes())


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


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
