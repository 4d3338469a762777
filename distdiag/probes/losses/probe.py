"""Writes down how much each element of a loss weighs in the gradient of an optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.base import CallSite
from distdiag.events.losses import LossWeights
from distdiag.probes.base import Probe
from distdiag.probes.compiled_passes import is_compiled_pass
from distdiag.probes.guard import guard, guarded, guarded_if, guarded_in_sight
from distdiag.probes.losses.aux_terms import (
    Aux,
    aux_terms,
    parts_of,
    without_aux,
)
from distdiag.probes.losses.graph import losses_of
from distdiag.probes.losses.labels import LabelTensors
from distdiag.probes.losses.reading import LossReading
from distdiag.probes.losses.score_marks import Origin, origin_of
from distdiag.probes.losses.terms import Step, number
from distdiag.probes.models.own_steps import OwnSteps, is_due
from distdiag.probes.models.wrappers import param_groups, wrapper_of
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# Over which ranks the wrapper of a model combines gradients, and what it divides their sum by.

Averaging = tuple[tuple[int, ...], float]

UNKNOWN: Averaging = ((), 0.0)
_MOST_GROUPS: Final = 64


def averaging_of(steps: OwnSteps, optimizer: torch.optim.Optimizer) -> Averaging:
    """Return the ranks and the divisor for the models of an optimizer; 0 if it is not known."""
    roots = steps.roots_of(optimizer)
    found = {averaging_in(root) for root in roots}
    if len(found) != 1:
        return UNKNOWN
    members, divisor = found.pop()
    is_local = any(map(steps.is_local, roots))
    return members, 0.0 if is_local else divisor


def known_groups() -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each process group that this rank belongs to."""
    groups = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
    return tuple(sorted(groups)[:_MOST_GROUPS])


def averaging_in(root: nn.Module) -> Averaging:
    """Return the ranks and the divisor for one model."""
    found: set[Averaging] = set()
    for module in root.modules():
        wrapper = wrapper_of(module, "")
        if wrapper is not None and (wrapper.kind != "FSDP2" or param_groups(module)):
            found.add((wrapper.ranks, _divisor(module, wrapper.kind, len(wrapper.ranks))))
    return found.pop() if len(found) == 1 else UNKNOWN


def _divisor(module: Untyped, kind: str, num_ranks: int) -> float:
    if isinstance(module, DistributedDataParallel):
        return 0.0 if getattr(module, "_comm_hooks", None) else float(num_ranks)
    if kind == "FSDP2":
        divisors = {_given(group, num_ranks) for group in param_groups(module)}
        return divisors.pop() if len(divisors) == 1 else 0.0
    if kind == "FSDP1":
        is_plain = getattr(module, "_comm_hook", None) is None
        is_hybrid = "HYBRID" in getattr(module.sharding_strategy, "name", "HYBRID")
        return float(num_ranks) if is_plain and not is_hybrid else 0.0
    return 0.0


def _given(group: object, num_ranks: int) -> float:
    if getattr(group, "_all_reduce_hook", None) is not None:
        return 0.0
    given = getattr(group, "gradient_divide_factor", None)
    return float(num_ranks) if given is None else float(given)


# Reads how much auxiliary losses weigh that a function of the program injects into a pass.
#
# Such a function passes a tensor on, and gives a loss beside it a gradient of its own choice.

_MOST_AWAITED: Final = 1024
_MOST_TERMS: Final = 8


class InjectedAux:
    """What forward passes have injected, and the gradients that the next pass gives it."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        self._num_awaited = 0
        self._found: list[Aux] = []

    @property
    def is_awaited(self) -> bool:
        """Say whether anything was injected since the last step."""
        return self._num_awaited > 0

    def see(self, node: Untyped) -> None:
        """Watch the node of a loss that was injected."""
        origin = origin_of(node)
        if origin is not None and self._num_awaited < _MOST_AWAITED:
            self._num_awaited += 1
            node.register_prehook(self._prehook(origin, parts_of(node)))

    def _prehook(
        self, origin: Origin, parts: list[tuple[Step, ...]]
    ) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def prehook(gradients: Sequence[torch.Tensor | None]) -> None:
            with guard(self._fail):
                gradient = gradients[0]
                is_one = gradient is not None and gradient.numel() == 1
                is_one = is_one and len(self._found) < _MOST_TERMS
                if gradient is not None and is_one and is_readable(gradient):
                    share = Step("/", number(gradient.detach().double().reciprocal()))
                    self._found += [Aux(origin, (share, *way), 0, True) for way in parts]

        return prehook

    def take(self) -> list[Aux]:
        """Return what a pass has come by, since it was asked last."""
        found, self._found = self._found, []
        return found

    def forget(self) -> None:
        """Begin anew with a step."""
        self._num_awaited, self._found = 0, []


# The probe.

MOST_PASSES: Final = 64
_MOST_WAITING: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says; `aux_loss_used` gets what is found."""

    inputs_seen: Signal[object]
    backward_started: Signal[object]
    backward_ended: Signal[bool]
    optimizer_stepping: Signal[Any, FrameType]
    step_ended: Signal[[]]
    aux_loss_injected: Signal[Any]
    aux_loss_doubted: Signal[bool]
    aux_loss_used: Signal[Sequence[str]]


class LossProbe(Probe):
    """Reads the losses of the backward passes before the steps at which to look."""

    name: ClassVar[str] = "losses"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        steps: OwnSteps,
        aux_coefficient: float = 0.0,
    ) -> None:
        """Know of no pass yet.

        `steps` knows which models an optimizer trains. `aux_coefficient` is what the configuration
        declares as that of auxiliary losses, 0 if it does not.
        """
        super().__init__(recorder)
        self._moments = moments
        self._aux_coefficient = aux_coefficient
        self._is_aux_doubted = False
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
        moments = self._moments
        self._subscribe(moments.inputs_seen, self._see)
        self._subscribe(moments.backward_started, self._before_backward)
        self._subscribe(moments.backward_ended, self._after_backward)
        self._subscribe(moments.optimizer_stepping, self._before_step)
        self._subscribe(moments.step_ended, self._forget)
        self._subscribe(moments.aux_loss_injected, self._see_injected)
        self._subscribe(moments.aux_loss_doubted, self._doubt_aux)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    def _see(self, given: object) -> None:
        if is_due(self.recorder.step):
            self._see_due(given)

    @guarded
    def _see_due(self, given: object) -> None:
        self._given.see(given)

    @guarded
    def _see_injected(self, node: object) -> None:
        if dist.is_initialized() and is_due(self.recorder.step):
            self._injected.see(node)

    @guarded
    def _before_backward(self, outputs: object) -> None:
        """Look at the graph that a pass is about to differentiate."""
        self._write()
        if not dist.is_initialized():
            return
        if not is_due(self.recorder.step):
            self._look_for_use(outputs)
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
        self._tell_used(aux)
        self._running = LossReading(terms, place, self.fail, labels, aux, targets)

    def _look_for_use(self, outputs: object) -> None:
        root = _root(outputs) if self._is_aux_doubted else None
        if root is not None:
            self._tell_used(aux_terms(root))

    def _tell_used(self, aux: list[Aux]) -> None:
        layers = [mark.layer for each in aux for mark in each.origin.marks.values()]
        self._moments.aux_loss_used.emit(layers)

    @guarded
    def _doubt_aux(self, is_doubted: bool) -> None:
        """Take note whether auxiliary losses are looked for in all steps, to see them used."""
        self._is_aux_doubted = is_doubted

    @guarded_if("_running")
    def _after_backward(self, _: bool) -> None:
        """Leave the graph: the pass is over, or has failed."""
        running, self._running = self._running, None
        if running is not None:
            running.end(self._injected.take())
            self._passes.append(running)

    @guarded_if("_num_passes")
    def _before_step(self, optimizer: object, _: FrameType) -> None:
        """Write down the passes whose gradients an optimizer is about to apply."""
        if not isinstance(optimizer, torch.optim.Optimizer):
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

    @guarded_in_sight
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
            self.recorder.event(
                LossWeights, passes=found, aux_coefficient=self._aux_coefficient, **fields
            )
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()


def _root(outputs: object) -> object:
    """Return the node of the only output of a pass, None if it is not one number or compiled."""
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if is_compiled_pass() or len(tensors) != 1:
        return None
    if type(tensors[0]) is not torch.Tensor or tensors[0].numel() != 1:
        return None
    return tensors[0].grad_fn
