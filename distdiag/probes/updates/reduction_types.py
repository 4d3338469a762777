"""Writes down gradients that another axis sums up in a narrower type than FSDP2's policy says."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from distdiag.events.base import CallSite
from distdiag.events.updates import ReducedInType
from distdiag.probes.base import Probe
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import clean_name
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder


class ReductionTypes(Probe):
    """Sees the gradient of each parameter right before FSDP2 gives it the placements it needs."""

    name: ClassVar[str] = "reduction-types"

    def __init__(self, recorder: Recorder) -> None:
        """Know of no parameter yet."""
        super().__init__(recorder)
        self._known: set[str] = set()

    def _install(self) -> None:
        wanted = self._call_before(self._before_reduction)
        self._patches.wrap(FSDPParam, "_get_grad_inner_tensor", wanted)

    def _before_reduction(self, param: Untyped, gradient: Untyped) -> None:
        if torch.compiler.is_compiling():
            return
        with guard(self.fail):
            name = clean_name(param._param_fqn or "")
            if name not in self._known and is_dtensor(gradient):
                self._look(name, param, gradient)

    def _look(self, name: str, param: Untyped, gradient: Untyped) -> None:
        wanted = param.reduce_dtype
        if wanted is None or gradient.dtype.itemsize >= wanted.itemsize:
            return
        mesh, kept = gradient.device_mesh, getattr(param, "_dp_dim_indices", ())
        is_spmd = getattr(param.mesh_info, "is_spmd_mesh", False)
        for axis, placement in enumerate(gradient.placements):
            is_own = is_spmd and axis in kept  # FSDP2 sums over these itself, in the wanted type
            if placement.is_partial() and mesh.size(axis) > 1 and not is_own:
                self._known.add(name)
                names = mesh.mesh_dim_names
                _, frames = self.recorder.backward or ((), ())
                self.recorder.event(
                    ReducedInType,
                    parameter=name,
                    dtype=str(gradient.dtype).removeprefix("torch."),
                    reduce_dtype=str(wanted).removeprefix("torch."),
                    axis=names[axis] if names else str(axis),
                    axis_size=mesh.size(axis),
                    step=self.recorder.step,
                    site=CallSite(frames),
                )
