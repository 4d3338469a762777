"""Writes down which steps a gradient scaler skips."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch

from distdiag.events.updates import ScalerStep
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import caller, site_here
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guard
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_MOST_WAITING: Final = 64


@dataclass(slots=True)
class _Scaler:
    """What is known of one scaler and one optimizer that it steps."""

    label: str
    number: int = 0
    num_skipped: int = 0
    num_stepped: int = 0


_Call = tuple[_Scaler, dict[str, Any]]
"""A call of a scaler, with the fields of its event."""


class ScalerProbe(Probe):
    """Sees each call of `GradScaler.step`, of torch's own class and of those derived from it."""

    name: ClassVar[str] = "scalers"

    def __init__(self, recorder: Recorder, stepping: Signal[Any, FrameType]) -> None:
        """Know of no scaler; `stepping` says that an optimizer does step."""
        super().__init__(recorder)
        self._stepping = stepping
        self._current: _Call | None = None
        self._scalers: WeakMap[Any, dict[str, _Scaler]] = WeakMap()
        self._waiting: deque[tuple[_Scaler, dict[str, Any], PendingValues]]
        self._waiting = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._subscribe(self._stepping, self._note_step)
        self._patches.wrap(torch.amp.grad_scaler.GradScaler, "step", self._around_step)

    def _note_step(self, *_: object) -> None:
        # At once: a step whose collectives a peer does not call never returns.
        current, self._current = self._current, None
        if current is not None:
            with guard(self.fail):
                self._tell(*current, is_skipped=False)

    def _around_step(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def step(scaler: Untyped, optimizer: Untyped, *args: object, **kwargs: object) -> object:
            if self.is_off or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            call: _Call | None = None
            with guard(self.fail):
                self._write_waiting()
                call = self._call(scaler, optimizer, caller())
            # A fused step is made in any case, and decides on the device what it changes.
            decides_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
            says_itself = isinstance(optimizer, torch.optim.Optimizer) and not decides_itself
            self._current = call if says_itself else None
            result = original(scaler, optimizer, *args, **kwargs)
            current, self._current = self._current, None
            if call is not None and not self.is_off:
                with guard(self.fail):
                    if current is not None:
                        self._tell(*current, is_skipped=True)
                    elif not says_itself:
                        self._wait(call, scaler, optimizer)
            return result

        return step

    def _call(self, scaler: Untyped, optimizer: Untyped, frame: FrameType) -> _Call:
        kind = type(optimizer).__name__
        known = self._scalers.setdefault(scaler, {})
        label = f"{type(scaler).__name__}#{list(self._scalers).index(scaler) + 1}"
        fields = {
            "optimizer": kind,
            "scale": _read(getattr(scaler, "_scale", None)),
            "step": self.recorder.step,
            "site": site_here(self.recorder, frame),
        }
        return known.setdefault(kind, _Scaler(label)), fields

    def _wait(self, call: _Call, scaler: Untyped, optimizer: Untyped) -> None:
        """Write the call down when it can be read whether the gradients were finite."""
        found = scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device", {})
        if found and all(is_readable(each) for each in found.values()):
            values = [each.detach().double().reshape(1) for each in found.values()]
            self._waiting.append((*call, PendingValues(values)))
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            known, fields, pending = self._waiting[0]
            found = pending.take()
            if found is None:
                return
            self._waiting.popleft()
            self._tell(
                known, fields, is_skipped=any(value != 0.0 for each in found for value in each)
            )

    def _tell(self, known: _Scaler, fields: dict[str, Any], *, is_skipped: bool) -> None:
        known.num_skipped = known.num_skipped + 1 if is_skipped else 0
        known.num_stepped += not is_skipped
        self.recorder.event(
            ScalerStep,
            scaler=known.label,
            number=known.number,
            is_skipped=is_skipped,
            num_skipped=known.num_skipped,
            num_stepped=known.num_stepped,
            **fields,
        )
        known.number += 1


def _read(scale: object) -> float:
    """Return a scale that lies on the CPU."""
    if isinstance(scale, torch.Tensor) and scale.is_cpu and is_readable(scale):
        return float(scale)
    return math.nan
