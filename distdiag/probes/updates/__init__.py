"""Observe what the steps of optimizers change, and in which types."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.probes.base import Probe
from distdiag.probes.catalogue import ProbeSpec, Wiring


def _updates(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.updates.probe import UpdateProbe

    signals, snapshots = wiring.signals, wiring.snapshots
    return [
        UpdateProbe(
            wiring.recorder,
            signals.optimizer_stepping,
            signals.optimizer_stepped,
            snapshots.own_steps,
            snapshots.name_of,
        )
    ]


def _scalers(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.updates.scalers import ScalerProbe

    return [ScalerProbe(wiring.recorder, wiring.signals.optimizer_stepping)]


PROBES = (
    ProbeSpec("updates", ("torch",), _updates),
    ProbeSpec("scalers", ("torch",), _scalers),
)
