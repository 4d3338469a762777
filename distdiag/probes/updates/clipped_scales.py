"""Notices gradients that are clipped while they are still multiplied by a scaler's factor."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from distdiag.events.base import CallSite
from distdiag.events.updates import ScaledClip
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guard
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_CLIPS: Final = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "clip_value"}


class ClippedScales(Probe):
    """Looks for a clip between `scaler.scale` and `scaler.step` without an `unscale_` before it."""

    name: ClassVar[str] = "clipped-scales"

    def __init__(self, recorder: Recorder, stepping: Signal[Any, Any]) -> None:
        """Know of no clip; `stepping` says that an optimizer steps, by a scaler or without."""
        super().__init__(recorder)
        self._stepping = stepping
        self._scaled_by: Callable[[], Untyped] = lambda: None
        self._clip: dict[str, Any] | None = None
        self._is_told = False

    def _install(self) -> None:
        self._subscribe(self._stepping, self._forget_clip)
        self._patches.wrap(GradScaler, "scale", self._call_before(self._note_scale))
        self._patches.wrap(GradScaler, "step", self._call_before(self._before_step))
        self._patches.wrap(GradScaler, "update", self._call_before(self._note_end))
        for name in _CLIPS:
            self._patches.wrap_everywhere(torch.nn.utils.clip_grad, name, self._around_clip)

    def _forget_clip(self, *_: object) -> None:
        self._clip = None

    def _note_scale(self, scaler: Untyped, *_: object, **__: object) -> None:
        if not self._is_told:
            self._scaled_by = weakref.ref(scaler)

    def _note_end(self, *_: object, **__: object) -> None:
        self._scaled_by = lambda: None
        self._clip = None

    def _around_clip(self, original: AnyCallable) -> AnyCallable:
        name = original.__name__

        @wrap_like(original)
        def clip(*args: object, **kwargs: object) -> object:
            scaler = None if self._is_told or self.is_off else self._scaled_by()
            if scaler is not None and scaler.is_enabled():
                with guard(self.fail):
                    limit = args[1] if len(args) > 1 else kwargs.get(_CLIPS[name])
                    self._note_clip(name, limit, scaler)
            return original(*args, **kwargs)

        return clip

    def _note_clip(self, name: str, limit: object, scaler: Untyped) -> None:
        stages = [each["stage"] for each in scaler._per_optimizer_states.values()]
        if OptState.UNSCALED in stages or not isinstance(limit, int | float):
            return
        site = CallSite(frames_of(sys._getframe(2), self.recorder.main_script))
        scale = _scale_of(scaler)
        self._clip = {"api": name, "limit": float(limit), "scale": scale, "site": site}

    def _before_step(self, _: object, optimizer: object, *__: object, **___: object) -> None:
        clip, self._clip = self._clip, None
        if clip is not None and not self.is_off:
            self._is_told = True
            self._note_end()
            self.recorder.event(ScaledClip, optimizer=type(optimizer).__name__, **clip)


def _scale_of(scaler: Untyped) -> float:
    """Return the factor where it lies on the CPU, else that with which the scaler began."""
    scale = scaler._scale
    if isinstance(scale, torch.Tensor) and scale.is_cpu and is_readable(scale):
        return float(scale)
    return float(scaler._init_scale)
