"""Observes where numbers that are not finite begin."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.probes.base import Probe
from distdiag.probes.catalogue import ProbeSpec, Wiring


def _make(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.models.registry import ModelNames
    from distdiag.probes.numerics.budget import Budget
    from distdiag.probes.numerics.probe import Moments, NumericsProbe

    moments = wiring.signals.pick(Moments)
    budget = Budget(wiring.config.numerics.cost_share)
    names = ModelNames(wiring.creations)
    models = wiring.models
    return [NumericsProbe(wiring.recorder, moments, models, names, budget, wiring.is_light)]


PROBES = (ProbeSpec("numerics", ("torch", "torch.distributed.distributed_c10d"), _make),)
