"""Writes down what the steps of optimizers change, at steps that are looked at."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import ObjectKind
from distdiag.events.updates import MOST_TENSORS, OptimizerUpdate, TensorUpdate
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guarded, guarded_if
from distdiag.probes.models.optimizer_state import named_parameters, parameters_of, rate_of
from distdiag.probes.models.own_steps import OwnSteps, is_due
from distdiag.probes.models.registry import LiveModels, class_of, roots_of
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.sample_rows import tensors_in
from distdiag.probes.updates.samples import (
    Batch,
    Sampled,
    batches_of,
    figures,
    is_wider_copy,
    keeps_precision,
    sampled_from,
)
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_MOST_WAITING: Final = 16

_Named = dict[int, tuple[str, torch.Tensor]]
"""Names and tensors of parameters, by the id of the tensor."""


@dataclass(slots=True)
class _Optimizer:
    """What is known of one optimizer."""

    label: str
    num_steps: int = 0
    full_rate: float = 0.0
    first: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Look:
    """A step that is looked at: what is known before it."""

    fields: dict[str, Any]
    batches: list[Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says."""

    optimizer_stepping: Signal[Any, FrameType]
    optimizer_stepped: Signal[Any]


class UpdateProbe(Probe):
    """Looks at the first steps of each optimizer, those of powers of two, and every hundredth."""

    name: ClassVar[str] = "updates"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        own_steps: OwnSteps,
        name_of: Callable[[nn.Module], str],
        modules: LiveModels,
        creations: Creations,
    ) -> None:
        """Know of no optimizer; `own_steps` knows their models, `name_of` the names of these.

        `modules` are those of a process that is alone, whose models nobody else looks at.
        """
        super().__init__(recorder)
        self._moments = moments
        self._own_steps = own_steps
        self._name_of = name_of
        self._modules = modules
        self._creations = creations
        self._optimizers: WeakMap[torch.optim.Optimizer, _Optimizer] = WeakMap()
        self._num_made: dict[str, int] = {}
        self._looks: WeakMap[torch.optim.Optimizer, _Look] = WeakMap()
        self._waiting: deque[tuple[dict[str, Any], list[TensorUpdate], PendingValues]]
        self._waiting = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._subscribe(self._moments.optimizer_stepping, self._before_step)
        self._subscribe(self._moments.optimizer_stepped, self._after_step)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    @guarded
    def _before_step(self, optimizer: object, frame: FrameType) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        known = self._optimizers.get(optimizer)
        if known is None:
            known = self._optimizers[optimizer] = _Optimizer(self._label(optimizer))
        number, known.num_steps = known.num_steps, known.num_steps + 1
        # With these the step itself unscales the gradients, or leaves everything as it is.
        is_scaled = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        if not is_due(number) or is_scaled or _is_captured():
            return
        self._write()
        model, named = self._names(optimizer)
        sampled = _sampled(optimizer, named)
        if not sampled:
            return
        rate, known.full_rate = _rates(optimizer, known.full_rate)
        fields = {
            "optimizer": known.label,
            "model": model,
            "number": number,
            "rate": rate,
            "full_rate": known.full_rate,
            "step": self.recorder.step,
            "site": CallSite(frames_of(frame, self.recorder.main_script)),
            "keeps_copies": _keeps_copies(optimizer, sampled),
            "rounds_to_nearest": type(optimizer).__module__.startswith("torch.optim"),
        }
        self._looks[optimizer] = _Look(fields, batches_of(sampled))

    def _label(self, optimizer: torch.optim.Optimizer) -> str:
        """Name an optimizer after its class, with a number from the second one on."""
        kind = type(optimizer).__name__
        number = self._num_made[kind] = self._num_made.get(kind, 0) + 1
        label = kind if number == 1 else f"{kind}#{number}"
        self._creations.tell(ObjectKind.OPTIMIZER, label, optimizer)
        return label

    def _names(self, optimizer: torch.optim.Optimizer) -> tuple[str, _Named]:
        """Return the name of the model that an optimizer trains, and those of its parameters."""
        roots = self._own_steps.roots_of(optimizer)
        if roots:
            return self._name_of(roots[0]), named_parameters(roots)
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        for root in () if dist.is_initialized() else roots_of(self._modules.alive()):
            named = named_parameters([root])
            if held & named.keys():
                self._creations.tell(ObjectKind.MODEL, class_of(root), root)
                return class_of(root), named
        return "", {}

    @guarded_if("_looks")
    def _after_step(self, optimizer: object) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        look, known = self._looks.pop(optimizer, None), self._optimizers.get(optimizer)
        if look is None or known is None or _is_captured():
            return
        numbers, updates = [], []
        kept = {batch.key: batch for batch in look.batches}
        known.first = {key: value for key, value in known.first.items() if key in kept}
        for key, batch in kept.items():
            first = known.first.setdefault(key, batch.before)
            numbers += figures(batch, optimizer.state, first, known.num_steps)
            updates += [_described(each, optimizer.state) for each in batch.members]
        norms = [norm.double() for batch in look.batches for norm in batch.norms]
        pending = PendingValues([*numbers, *norms])
        self._waiting.append((look.fields, updates, pending))
        self._write()

    def _write(self) -> None:
        while self._waiting:
            fields, updates, pending = self._waiting[0]
            found = pending.take()
            if found is None:
                return
            self._waiting.popleft()
            rows = zip(updates, found, found[len(updates) :], strict=False)
            tensors = tuple(_with_figures(update, row, norm[0]) for update, row, norm in rows)
            self.recorder.event(OptimizerUpdate, tensors=tensors, **fields)


def _sampled(optimizer: torch.optim.Optimizer, named: _Named) -> list[Sampled]:
    found = []
    for group_number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            unnamed = f"param_groups[{group_number}]['params'][{place}]"
            name = named.get(id(parameter), (unnamed, parameter))[0]
            found.append((name, parameter, group))
    stride = max(1, -(-len(found) // MOST_TENSORS))
    taken = (sampled_from(*each) for each in found[::stride])
    return [each for each in taken if each is not None]


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _rates(optimizer: torch.optim.Optimizer, full_before: float) -> tuple[float, float]:
    """Return the highest rate of the groups, and the one that they once start from or come to."""
    rates = [rate for group in optimizer.param_groups if not math.isnan(rate := rate_of(group))]
    starts = [
        start
        for group in optimizer.param_groups
        if isinstance(start := group.get("initial_lr"), float | int)
    ]
    return max(rates, default=math.nan), max([full_before, *rates, *starts])


def _keeps_copies(optimizer: torch.optim.Optimizer, sampled: list[Sampled]) -> bool:
    """Say whether an optimizer has wider tensors of the size of narrow parameters by itself."""
    narrow = [each.parameter for each in sampled if each.local.element_size() < 4]
    if not narrow:
        return False
    usual = ("state", "param_groups", "defaults")
    others = {key: value for key, value in vars(optimizer).items() if key not in usual}
    by_size = {each.numel(): each for each in narrow}
    found = ((tensor, by_size.get(tensor.numel())) for tensor in tensors_in(others))
    return any(each is not None and is_wider_copy(tensor, each) for tensor, each in found)


def _described(one: Sampled, state: Mapping[Any, Any]) -> TensorUpdate:
    kept = state.get(one.parameter, {})
    tensors = kept.items() if isinstance(kept, Mapping) else ()
    return TensorUpdate(
        name=one.name,
        dtype=_name(one.local.dtype),
        gradient_dtype=_name(one.gradient.dtype),
        num_elements=one.local.numel(),
        learning_rate=rate_of(one.group),
        state=tuple(
            (str(key), _name(local_part(value).dtype))
            for key, value in tensors
            if isinstance(value, torch.Tensor) and value.numel() == one.parameter.numel() > 1
        ),
        keeps_precision=one.local.element_size() < 4 and keeps_precision(one.parameter, kept),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_figures(update: TensorUpdate, row: tuple[float, ...], norm: float) -> TensorUpdate:
    """Fill in the counts, and make means of the sums."""
    sampled, unchanged, moved, small, changed = map(int, row[:5])
    expected, updates, weights, spacings = row[5:]
    number = max(sampled, 1)
    return TensorUpdate(
        update.name,
        update.dtype,
        update.gradient_dtype,
        update.num_elements,
        update.learning_rate,
        update.state,
        sampled,
        unchanged,
        moved,
        small,
        changed,
        expected,
        updates / number,
        weights / number,
        spacings / number,
        norm,
        update.keeps_precision,
    )
