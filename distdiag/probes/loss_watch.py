"""Writes down how much each element of a loss weighs in the gradient of an optimizer step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from distdiag.event import CallSite
from distdiag.loss_event import LossWeights
from distdiag.probes.aux_terms import NO_BALANCE, Aux, Balance, Numbers, aux_terms, without_aux
from distdiag.probes.averaging import averaging_of, known_groups
from distdiag.probes.base import Probe
from distdiag.probes.by_identity import WeakMap
from distdiag.probes.guard import guarded
from distdiag.probes.held_numbers import held_numbers
from distdiag.probes.injected_aux import InjectedAux
from distdiag.probes.label_tensors import LabelTensors
from distdiag.probes.loss_graph import losses_of
from distdiag.probes.loss_reading import LossReading
from distdiag.probes.named_coefficients import named_coefficients
from distdiag.probes.own_steps import OwnSteps, is_due
from distdiag.recorder import Recorder

MOST_PASSES: Final = 64
_MOST_WAITING: Final = 8


class LossWatch(Probe):
    """Reads the losses of the backward passes before the first steps and every hundredth."""

    name: ClassVar[str] = "losses"

    def __init__(self, recorder: Recorder, steps: OwnSteps) -> None:
        """Know of no pass yet; `steps` knows which models an optimizer trains."""
        super().__init__(recorder)
        self._models = steps
        self._num_passes = 0
        self._passes: list[LossReading] = []
        self._places: dict[Hashable, int] = {}
        self._site = CallSite(())
        self._running: LossReading | None = None
        self._given = LabelTensors()
        self._labels: WeakMap[Any, str] = WeakMap()
        self._num_labels: dict[str, int] = {}
        self._injected = InjectedAux(self.fail)
        self._waiting: deque[tuple[dict[str, Any], list[LossReading]]] = deque()

    def _install(self) -> None:
        self.recorder.on_step.append(self._forget)
        self.recorder.on_given.append(self._see)
        self.recorder.on_injected.append(self._see_injected)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    @guarded
    def _see(self, given: object) -> None:
        if is_due(self.recorder.step):
            self._given.see(given)

    @guarded
    def _see_injected(self, node: object) -> None:
        if dist.is_initialized() and is_due(self.recorder.step):
            self._injected.see(node)

    @guarded
    def before_backward(self, outputs: object) -> None:
        """Look at the graph that a pass is about to differentiate."""
        self._write()
        if not dist.is_initialized():
            return
        if not is_due(self.recorder.step):
            self._look_for_balance(outputs)
            return
        self._num_passes += 1
        if len(self._passes) >= MOST_PASSES:
            return
        key, frames = self.recorder.backward or ((), ())
        place = self._places.setdefault(key, len(self._places))
        self._site = CallSite(frames)
        root = _root(outputs)
        terms = [] if root is None else losses_of(root)
        aux = [] if root is None else aux_terms(root)
        terms = without_aux(terms) if aux else terms
        labels, targets = self._given.counts_for(terms), self._given.take_targets()
        self._tell_balanced(aux)
        has_balance = bool(aux) or self._injected.is_awaited
        balance = Balance(tuple(aux), self._numbers()) if has_balance else NO_BALANCE
        self._running = LossReading(terms, place, self.fail, labels, balance, targets)

    def _look_for_balance(self, outputs: object) -> None:
        root = _root(outputs) if self.recorder.doubts_balance() else None
        if root is not None:
            self._tell_balanced(aux_terms(root))

    def _tell_balanced(self, aux: list[Aux]) -> None:
        for tell in self.recorder.on_balanced:
            tell([mark.layer for each in aux for mark in each.origin.marks.values()])

    @guarded
    def after_backward(self) -> None:
        """Leave the graph: the pass is over, or has failed."""
        running, self._running = self._running, None
        if running is not None:
            running.end(self._injected.take())
            self._passes.append(running)

    @guarded
    def before_step(self, optimizer: object, _: FrameType) -> None:
        """Write down the passes whose gradients an optimizer is about to apply."""
        if not isinstance(optimizer, torch.optim.Optimizer) or not self._num_passes:
            return
        if len(self._passes) == self._num_passes:
            members, divisor = averaging_of(self._models, optimizer)
            fields = {
                "optimizer": self._label(optimizer),
                "step": self.recorder.step,
                "members": members,
                "divisor": divisor,
                "site": self._site,
                "groups": known_groups(),
            }
            self._waiting.append((fields, self._passes))
        self._forget()
        self._write()

    def _label(self, optimizer: torch.optim.Optimizer) -> str:
        label = self._labels.get(optimizer)
        if label is None:
            kind = type(optimizer).__name__
            number = self._num_labels[kind] = self._num_labels.get(kind, 0) + 1
            label = self._labels[optimizer] = kind if number == 1 else f"{kind}#{number}"
        return label

    def _numbers(self) -> Numbers:
        models = self.recorder.live_models() if self.recorder.live_models is not None else ()
        given = (sys._getframe(1), self.recorder.main_script, list(models))
        return Numbers(held_numbers(*given), named_coefficients(*given))

    def _forget(self) -> None:
        self._num_passes, self._passes, self._places = 0, [], {}
        self._injected.forget()

    def _write(self) -> None:
        while self._waiting:
            fields, readings = self._waiting[0]
            if not all([reading.take() for reading in readings]):
                break
            self._waiting.popleft()
            found = tuple(reading.result for reading in readings)
            self.recorder.event(LossWeights, passes=found, **fields)
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()


def _is_compiled() -> bool:
    """Say whether the pass itself is compiled: hooks would become a part of it."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _root(outputs: object) -> Any:  # noqa: ANN401
    """Return the node of the only output of a pass, None if it is not one number or compiled."""
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if _is_compiled() or len(tensors) != 1:
        return None
    if type(tensors[0]) is not torch.Tensor or tensors[0].numel() != 1:
        return None
    return tensors[0].grad_fn
