"""Notices that gradients are clipped which the optimizer does not apply as they are then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch.nn.utils import clip_grad

from distdiag.events.base import CallSite
from distdiag.events.updates import ClipMissed
from distdiag.probes.base import AnyCallable, Probe, like, wrap_like
from distdiag.probes.call_sites import caller, site_here
from distdiag.probes.guard import guard
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.own_steps import FIRST_STEPS
from distdiag.probes.tensors.by_identity import WeakMembers
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_LARGEST_NORM: Final = 100.0
"""Recipes clip to norms from 0.1 to 10. A bound that a program has multiplied by the loss scale, as
it may, is larger: scalers begin with 65536."""


@dataclass(slots=True)
class _Clip:
    """What was clipped since the last step."""

    held: frozenset[int]
    max_norm: float
    num_given: int
    num_with_gradient: int
    site: CallSite


class Clipping(Probe):
    """Looks at what `clip_grad_norm_` is given in the first calls.

    Two things are told. The gradients are still multiplied by the scale of a loss, and the scaler
    unscales them afterwards. Or no optimizer holds what is given, while one holds gradients.
    """

    name: ClassVar[str] = "clipping"

    def __init__(
        self,
        recorder: Recorder,
        stepping: Signal[Any, FrameType],
    ) -> None:
        """Know of no clipping; the signal tells of the steps behind it."""
        super().__init__(recorder)
        self._stepping = stepping
        self._optimizers: WeakMembers[torch.optim.Optimizer] = WeakMembers()
        self._clip: _Clip | None = None
        self._num_clips = 0
        self._is_apart = False
        self._is_told = False

    def _install(self) -> None:
        self._patches.wrap(torch.optim.Optimizer, "__init__", self._after_optimizer)
        # By its public name programs call it that compute the norm themselves.
        name, public = "_clip_grads_with_norm_", "clip_grads_with_norm_"
        self._patches.wrap_everywhere(clip_grad, name, self._around_clip, public)
        self._patches.wrap(torch.amp.grad_scaler.GradScaler, "step", self._around_step)
        self._subscribe(self._stepping, self._before_step)

    def _after_optimizer(self, original: AnyCallable) -> AnyCallable:
        @like(original)
        def init(optimizer: Untyped, *args: object, **kwargs: object) -> object:
            result = original(optimizer, *args, **kwargs)
            if not self._num_clips and not self.is_off:
                with guard(self.fail):
                    self._optimizers.add(optimizer)
            return result

        return init

    def _around_clip(self, original: AnyCallable) -> AnyCallable:
        # Without the mark that other wrappers bear: a step may be compiled as a whole.
        @like(original)
        def clip_grads_with_norm_(
            parameters: Untyped, max_norm: Untyped, *args: object, **kwargs: object
        ) -> object:
            if torch.compiler.is_compiling():
                return original(parameters, max_norm, *args, **kwargs)
            is_wanted = self._num_clips < FIRST_STEPS and not self._is_told and not self.is_off
            if is_wanted and isinstance(parameters, (list, tuple, torch.Tensor)):
                with guard(self.fail):
                    self._note(parameters, max_norm, caller())
            return original(parameters, max_norm, *args, **kwargs)

        return clip_grads_with_norm_

    def _note(self, given: Untyped, max_norm: object, frame: FrameType) -> None:
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        number = sum(each.grad is not None for each in tensors)
        most = float(max_norm) if isinstance(max_norm, int | float) else math.inf
        held = frozenset(map(id, tensors))
        site = site_here(self.recorder, frame)
        self._clip = _Clip(held, most, len(tensors), number, site)
        if not self._num_clips:
            self._is_apart = self._are_apart(tensors)
        self._num_clips += 1

    def _are_apart(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Say whether all gradients that optimizers find now are others than those given.

        What is given has none, or the same shapes: copies. An optimizer that copies gradients in
        its step has none before the first one.
        """
        found = [p for o in self._optimizers for p in parameters_of(o)]
        given, held = set(map(id, tensors)), set(map(id, found))
        own = [each for each in found if each.grad is not None]
        if not own or given & held:
            return False
        having = [each.shape for each in tensors if each.grad is not None]
        return not having or sorted(having) == sorted(each.shape for each in own)

    def _around_step(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def step(scaler: Untyped, optimizer: Untyped, *args: object, **kwargs: object) -> object:
            if self._clip is not None and not self._is_told and not self.is_off:
                with guard(self.fail):
                    self._before_unscaling(scaler, optimizer, caller())
            return original(scaler, optimizer, *args, **kwargs)

        return step

    def _before_unscaling(self, scaler: Untyped, optimizer: Untyped, frame: FrameType) -> None:
        clip, self._clip = self._clip, None
        if clip is None or not scaler.is_enabled() or getattr(scaler, "_scale", None) is None:
            return
        if not getattr(scaler, "_init_scale", 2.0) > 1.0:
            return  # it only looks for what is not finite
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        is_unscaled = getattr(state.get("stage"), "name", "READY") != "READY"
        held = {id(each) for each in parameters_of(optimizer)}
        if not is_unscaled and clip.held & held and 0 < clip.max_norm <= _LARGEST_NORM:
            self._tell(clip, type(optimizer).__name__, type(scaler).__name__, frame)

    def _before_step(self, optimizer: object, frame: FrameType) -> None:
        if self._clip is None:
            return
        clip, self._clip = self._clip, None
        if not self._is_apart or self._is_told or self.is_off:
            return
        if isinstance(optimizer, torch.optim.Optimizer):
            with guard(self.fail):
                self._tell(clip, type(optimizer).__name__, "", frame)

    def _tell(self, clip: _Clip, optimizer: str, scaler: str, frame: FrameType) -> None:
        self._is_told = True
        self.recorder.event(
            ClipMissed,
            optimizer=optimizer,
            scaler=scaler,
            max_norm=clip.max_norm,
            num_given=clip.num_given,
            num_with_gradient=clip.num_with_gradient,
            step=self.recorder.step,
            site=clip.site,
            step_site=site_here(self.recorder, frame),
        )
