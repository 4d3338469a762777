"""From which state random operations on DTensors draw: it must be one on all ranks of a mesh."""

from __future__ import annotations

import sys
from types import FrameType
from typing import ClassVar, Final

import torch
from torch.distributed.tensor._random import OffsetBasedRNGTracker

from distdiag.events.base import CallSite
from distdiag.events.random import RandomDraw
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.generators import digest_of
from distdiag.probes.guard import guard
from distdiag.probes.models.meshes import mesh_of, replicas_on_mesh
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

_FIRST: Final = 8
_METHODS: Final = ("_distribute_region", "_compute_rng_offsets")
"""A random operation passes through the first or the second, depending on version and device."""

_INNER: Final = ("_set_pre_op_offset", "_set_post_op_offset")
"""These are parts of the first, and call the second once more."""


class RandomDraws(Probe):
    """Writes down the first draws on each mesh, and then those whose number is a power of two."""

    name: ClassVar[str] = "random-draws"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._counts: dict[tuple[int, ...], int] = {}

    def _install(self) -> None:
        for name in [n for n in _METHODS if n in vars(OffsetBasedRNGTracker)] or _METHODS[:1]:
            self._patches.wrap(OffsetBasedRNGTracker, name, self._before)

    def _before(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def method(self_: object, spec: object, *args: object, **kwargs: object) -> object:
            frame = sys._getframe(1)
            is_quiet = self.is_off or torch.compiler.is_compiling()
            if not is_quiet and frame.f_code.co_name not in _INNER:
                with guard(self.fail):
                    generator = kwargs.get("generator") or next(iter(args), None)
                    self._note(spec, generator, frame)
            return original(self_, spec, *args, **kwargs)

        return method

    def _note(self, spec: Untyped, generator: Untyped, frame: FrameType) -> None:
        members = mesh_of(spec.mesh).ranks
        number = self._counts[members] = self._counts.get(members, -1) + 1
        if number >= _FIRST and number & (number - 1):
            return
        digest = digest_of(_state(spec, generator))
        if digest:
            self.recorder.event(
                RandomDraw,
                number=number,
                members=members,
                replicas=replicas_on_mesh(spec.mesh, spec.placements),
                digest=digest,
                site=CallSite(frames_of(frame, self.recorder.main_script)),
            )


def _state(spec: Untyped, generator: Untyped) -> object:
    """Return the state from which is drawn; on a GPU the host keeps it, and nothing waits."""
    if generator is not None:
        return generator.get_state()
    if spec.mesh.device_type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()].get_state()
