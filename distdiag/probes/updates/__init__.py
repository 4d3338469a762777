"""Observe what the steps of optimizers change, and in which types."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.probes.base import Probe
from distdiag.probes.catalogue import ProbeSpec, Wiring


def _updates(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.updates.probe import Moments, UpdateProbe

    snapshots = wiring.snapshots
    return [
        UpdateProbe(
            wiring.recorder,
            wiring.signals.pick(Moments),
            snapshots.own_steps,
            snapshots.name_of,
            wiring.models,
            wiring.creations,
        )
    ]


def _scalers(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.updates.scalers import ScalerProbe

    return [ScalerProbe(wiring.recorder, wiring.signals.optimizer_stepping)]


def _autocast(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.updates.autocast_casts import AutocastCasts

    signals = wiring.signals
    return [AutocastCasts(wiring.recorder, signals.optimizer_stepping, signals.backward_started)]


def _buffer_casts(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.updates.buffer_casts import BufferCasts

    return [BufferCasts(wiring.recorder, wiring.creations)]


def _reduction_types(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.updates.reduction_types import ReductionTypes

    return [ReductionTypes(wiring.recorder)]


PROBES = (
    ProbeSpec("updates", ("torch",), _updates),
    ProbeSpec("scalers", ("torch",), _scalers),
    ProbeSpec("autocast-casts", ("torch",), _autocast),
    ProbeSpec("buffer-casts", ("torch",), _buffer_casts),
    ProbeSpec(
        "reduction-types",
        (
            "torch",
            "torch.distributed.fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_param",
        ),
        _reduction_types,
    ),
)
