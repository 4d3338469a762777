"""Observes the numbers that a training logs, and those that its losses hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distdiag.probes.base import Probe
from distdiag.probes.catalogue import ProbeSpec, Wiring

_LIBRARIES: Final = (
    "accelerate.accelerator",
    "lightning.pytorch.core.module",
    "mlflow.tracking.fluent",
    "pytorch_lightning.core.module",
    "tensorboardX.writer",
    "torch.utils.tensorboard.writer",
    "transformers.trainer",
    "wandb.sdk.wandb_run",
)
"""The modules whose functions are given numbers by name; `loggers.LOGGERS` says which."""


def _log(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.logged.loggers import LoggedNumbers

    return [LoggedNumbers(wiring.recorder)]


def _losses(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.logged.loss_numbers import LossNumberProbe, Moments

    return [LossNumberProbe(wiring.recorder, wiring.signals.pick(Moments))]


def _warnings(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.logged.shown_warnings import ShownWarnings

    return [ShownWarnings(wiring.recorder)]


def _memory(wiring: Wiring) -> Sequence[Probe]:
    from distdiag.probes.logged.memory import StepMemory

    signals = wiring.signals
    return [StepMemory(wiring.recorder, signals.backward_started, signals.step_ended)]


def _codebooks(wiring: Wiring) -> Sequence[Probe]:
    if wiring.is_light:
        return []
    from distdiag.probes.logged.codebooks import CodeChoices
    from distdiag.probes.models.registry import roots_of

    # One process alone may have a codebook, too.
    return [CodeChoices(wiring.recorder, lambda: roots_of(wiring.models.alive()))]


def _library(module: str) -> ProbeSpec:
    def make(wiring: Wiring) -> Sequence[Probe]:
        from distdiag.probes.logged.loggers import LoggerCalls

        return [LoggerCalls(wiring.recorder, module)]

    return ProbeSpec(f"logger-{module}", ("torch", module), make)


PROBES = (
    ProbeSpec("logged-numbers", ("torch",), _log),
    ProbeSpec("loss-numbers", ("torch",), _losses),
    ProbeSpec("shown-warnings", (), _warnings),
    ProbeSpec("step-memory", ("torch",), _memory),
    ProbeSpec("code-choices", ("torch",), _codebooks),
    *map(_library, _LIBRARIES),
)
