"""Notices that a pass uses casts which autocast has kept since before an optimizer's step."""

from __future__ import annotations

from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch

from distdiag.events.base import CallSite
from distdiag.events.updates import CastsReused
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guard
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.out_of_sight import in_sight
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_DEVICES: Final = ("cuda", "cpu")


class _Step(NamedTuple):
    """A step inside an autocast region that has not ended since."""

    optimizer: str
    dtype: str
    site: CallSite


class AutocastCasts(Probe):
    """Looks for a backward pass in the same region as a step before it."""

    name: ClassVar[str] = "autocast-casts"

    def __init__(
        self, recorder: Recorder, stepping: Signal[Any, FrameType], backward: Signal[object]
    ) -> None:
        """Know of no step; the signals tell of steps and of the passes behind them."""
        super().__init__(recorder)
        self._stepping = stepping
        self._backward = backward
        self._step: _Step | None = None
        self._is_told = False

    def _install(self) -> None:
        self._patches.wrap(torch, "clear_autocast_cache", self._call_before(self._note_end))
        self._subscribe(self._stepping, self._before_step)
        self._subscribe(self._backward, self._before_backward)

    def _note_end(self) -> None:
        self._step = None

    def _before_step(self, optimizer: object, frame: FrameType) -> None:
        if self._is_told or self.is_off or torch.compiler.is_compiling():
            return
        dtypes = _autocast_dtypes()  # out of sight there is none
        if dtypes and isinstance(optimizer, torch.optim.Optimizer):
            with guard(self.fail):
                # What else is not cast, or not kept.
                held = parameters_of(optimizer)
                if any(each.dtype is torch.float32 and each.requires_grad for each in held):
                    site = CallSite(frames_of(frame, self.recorder.main_script))
                    self._step = _Step(type(optimizer).__name__, dtypes[0], site)

    def _before_backward(self, _: object) -> None:
        step, self._step = self._step, None
        if step is None or self.is_off:
            return
        with in_sight():
            has_ended = not _autocast_dtypes()
        if has_ended:
            return
        self._is_told = True
        with guard(self.fail):
            _, frames = self.recorder.backward or ((), ())
            self.recorder.event(
                CastsReused,
                optimizer=step.optimizer,
                dtype=step.dtype,
                step=self.recorder.step,
                site=CallSite(frames),
                step_site=step.site,
            )


def _autocast_dtypes() -> list[str]:
    """Return the types to which autocast casts weights now, if it keeps the results."""
    if not torch.is_autocast_cache_enabled():
        return []
    names = (str(torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
    return [name.removeprefix("torch.") for name in names]
