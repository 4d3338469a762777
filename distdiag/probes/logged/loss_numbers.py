"""Writes down the numbers of losses: value, terms, ratio of a policy, predictions, clamps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import torch

from distdiag.events.base import CallSite
from distdiag.events.logged import (
    NOWHERE,
    Clamped,
    LossNumbers,
    LossTerm,
    PolicyRatio,
    Prediction,
)
from distdiag.probes.base import Probe
from distdiag.probes.compiled_passes import is_compiled_pass
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.guard import guard, guarded, guarded_if, guarded_in_sight
from distdiag.probes.logged.loss_graph import (
    Addend,
    addends_of,
    landmarks_of,
    read_clamps,
    read_logits,
    read_ratio,
)
from distdiag.probes.losses.terms import Scalar
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

ALL_OF_FIRST: Final = 64
"""So many steps are looked at, then every 16th."""
THEN_EVERY: Final = 16
_MOST_PASSES: Final = 4
"""Of one step: the others are micro-batches like these."""
_NEAR_NODES: Final = 200
_FAR_NODES: Final = 2000
_MOST_WAITING: Final = 16
_RATIO: Final = -1
"""The number of the ratio among the terms."""
_SAMPLERS: Final = ("multinomial", "normal", "bernoulli")
"""By these a policy chooses its actions or tokens, in `torch.distributions` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says."""

    backward_started: Signal[object]
    backward_ended: Signal[bool]
    optimizer_stepped: Signal[Any]
    step_ended: Signal[[]]


class _Numbers:
    """Numbers in the order in which they were added, some of which a device still computes."""

    def __init__(self) -> None:
        self._values: list[Scalar] = []
        self._vectors: list[torch.Tensor] = []
        self.vectors: list[tuple[float, ...]] = []
        """The vectors, once `take` has returned the numbers."""
        self._pending: PendingValues | None = None

    def add(self, *values: Scalar) -> slice:
        """Add numbers; return where they will be."""
        begin = len(self._values)
        self._values += values
        return slice(begin, len(self._values))

    def add_vector(self, vector: torch.Tensor) -> int:
        """Add a vector of doubles; return its number among those."""
        self._vectors.append(vector)
        return len(self._vectors) - 1

    def begin(self) -> None:
        """Begin to bring over what is on a device."""
        on_device = [v.double().reshape(1) for v in self._values if isinstance(v, torch.Tensor)]
        on_device += self._vectors
        self._pending = PendingValues(on_device) if on_device else None

    def take(self) -> list[float] | None:
        """Return all numbers, None if they are not there yet."""
        found = self._pending.take() if self._pending is not None else []
        if found is None:
            return None
        num_numbers = len(found) - len(self._vectors)
        brought, self.vectors = iter(found[:num_numbers]), found[num_numbers:]
        return [next(brought)[0] if isinstance(v, torch.Tensor) else v for v in self._values]


class _Pass:
    """One backward pass, from before it begins."""

    def __init__(self, fields: dict[str, Any], loss: torch.Tensor) -> None:
        self.fields = fields
        self.numbers = _Numbers()
        self._ratio_node: Any = None
        self._loss = self.numbers.add(loss.detach().double().reshape(()).clone())
        self._terms: list[tuple[Addend, list[slice]]] = []
        self._gradients: dict[int, Scalar] = {}
        self._ratio: tuple[slice, bool] | None = None
        self._prediction: tuple[int, int, slice, int] | None = None
        self._clamps: list[tuple[float, float, int, slice]] = []
        self._handles: list[Any] = []
        self._ratio_gradient = slice(0, 0)

    def read(self, root: object, *, has_sampled: bool, is_far: bool) -> None:
        """Read what the graph holds."""
        marks = landmarks_of(root, _FAR_NODES if is_far else _NEAR_NODES)
        ratio = read_ratio(marks.ratio) if marks.ratio is not None else []
        if ratio:
            self._ratio = self.numbers.add(*ratio), has_sampled
            self._ratio_node = marks.ratio
        found = read_logits(marks)
        if found is not None:
            num_classes, num_rows, numbers, targets = found
            places = self.numbers.add(*numbers), self.numbers.add_vector(targets)
            self._prediction = num_classes, num_rows, *places
        for least, greatest, number, outside in read_clamps(marks.clamps if is_far else ()):
            self._clamps.append((least, greatest, number, self.numbers.add(outside)))

    @property
    def has_ratio(self) -> bool:
        """Say whether the loss is that of a policy."""
        return self._ratio is not None

    def watch(self, terms: Sequence[Addend], fail: Callable[[Exception], None]) -> None:
        """Look at the gradients that go through the terms and the ratio, until `end`."""
        if self._ratio_node is not None:
            hook = partial(self._see, _RATIO, 0, fail)
            self._handles.append(self._ratio_node.register_prehook(hook))
            self._ratio_node = None
        for index, term in enumerate(terms):
            places = [self.numbers.add(*term.factors), self.numbers.add(*term.masks)]
            self._terms.append((term, places))
            hook = partial(self._see, index, term.index, fail)
            self._handles.append(term.node.register_prehook(hook))
            term.node = None

    def _see(
        self,
        index: int,
        output: int,
        fail: Callable[[Exception], None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        with guard(fail):
            gradient = gradients[output] if output < len(gradients) else None
            if gradient is not None and is_readable(gradient):
                wide = gradient.detach().reshape(-1)
                largest = wide.abs().amax() if wide.numel() else wide.new_zeros(())
                self._gradients[index] = largest.double()

    def end(self) -> None:
        """Leave the graph; begin to bring over what a device has computed."""
        while self._handles:
            self._handles.pop().remove()
        for index, (_, places) in enumerate(self._terms):
            places.append(self.numbers.add(self._gradients.get(index, math.nan)))
        self._ratio_gradient = self.numbers.add(self._gradients.get(_RATIO, math.nan))
        self.numbers.begin()

    def result(self) -> dict[str, Any] | None:
        """Return the fields of the event, None if they are not all there yet."""
        values = self.numbers.take()
        if values is None:
            return None
        found: dict[str, Any] = {"loss": values[self._loss][0], **self.fields}
        found["terms"] = tuple(self._resolved(values))
        if self._ratio is not None:
            deviation, number = values[self._ratio[0]]
            (gradient,) = values[self._ratio_gradient]
            found["ratio"] = PolicyRatio(deviation, int(number), gradient, self._ratio[1])
        if self._prediction is not None:
            num_classes, num_rows, place, targets = self._prediction
            labels = tuple(int(each) for each in self.numbers.vectors[targets] if each >= 0)
            entropy, cross_entropy, share = values[place]
            found["prediction"] = Prediction(
                num_classes, num_rows, entropy, cross_entropy, share, labels
            )
        found["clamps"] = tuple(
            Clamped(least, greatest, number, values[place][0])
            for least, greatest, number, place in self._clamps
        )
        return found

    def _resolved(self, values: Sequence[float]) -> Iterator[LossTerm]:
        for term, (factors, masks, gradient) in self._terms:
            shares = values[masks]
            yield LossTerm(
                " ".join(term.operations),
                math.prod(values[factors]),
                values[gradient][0],
                min(shares, default=-1.0),
            )


class LossNumberProbe(Probe):
    """Reads the losses of the first backward passes, and of every 16th step."""

    name: ClassVar[str] = "loss-numbers"

    def __init__(self, recorder: Recorder, moments: Moments) -> None:
        super().__init__(recorder)
        self._moments = moments
        self._num_passes = 0
        self._has_sampled = False
        self._knows_ratio = False
        self._rate = math.nan
        self._place: Hashable = None
        self._running: _Pass | None = None
        self._waiting: deque[_Pass] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        moments = self._moments
        self._subscribe(moments.backward_started, self._before_backward)
        self._subscribe(moments.backward_ended, self._after_backward)
        self._subscribe(moments.optimizer_stepped, self._stepped)
        self._subscribe(moments.step_ended, self._step_ended)
        self._patches.wrap_all(torch, dict.fromkeys(_SAMPLERS, self._call_before(self._sampling)))

    @guarded
    def flush(self) -> None:
        """Write down what is there by now."""
        self._write()

    def _sampling(self, *_: object, **__: object) -> None:
        self._has_sampled = True

    @guarded
    def _before_backward(self, outputs: object) -> None:
        self._write()
        step, self._num_passes = self.recorder.step, self._num_passes + 1
        is_due = step < ALL_OF_FIRST or step % THEN_EVERY == 0
        is_due = is_due and self._num_passes <= _MOST_PASSES
        loss = _loss(outputs)
        if loss is None or not (is_due or (self._has_sampled and self._knows_ratio)):
            self._has_sampled = False  # the ratio of this pass, if it has one, was the first
            return
        key, frames = self.recorder.backward or ((), ())
        site = NOWHERE if key == self._place else CallSite(frames)
        self._place = key
        is_coarse = loss.dtype in (torch.float16, torch.bfloat16)
        fields = {"is_coarse": is_coarse, "rate": self._rate, "site": site, "step": step}
        one = _Pass(fields, loss)
        one.read(
            loss.grad_fn, has_sampled=self._has_sampled, is_far=step > 0 and step % THEN_EVERY == 0
        )
        one.watch(addends_of(loss.grad_fn), self.fail)
        if one.has_ratio:
            self._knows_ratio, self._has_sampled = True, False
        self._running = one

    @guarded_if("_running")
    def _after_backward(self, _: bool) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()
            self._waiting.append(running)

    @guarded_in_sight
    def _stepped(self, optimizer: Untyped) -> None:
        groups = getattr(optimizer, "param_groups", ())
        rates = [rate for group in groups if isinstance(rate := group.get("lr"), int | float)]
        self._rate = float(max(rates, default=math.nan))

    @guarded_in_sight
    def _step_ended(self) -> None:
        self._num_passes, self._has_sampled = 0, False
        self._write()

    @guarded_if("_waiting")
    def _write(self) -> None:
        while self._waiting:
            found = self._waiting[0].result()
            if found is None:
                return
            self._waiting.popleft()
            self.recorder.event(LossNumbers, **found)


def _loss(outputs: object) -> torch.Tensor | None:
    """Return the only output of a pass, None if it is not one number or cannot be read."""
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if len(tensors) != 1 or type(tensors[0]) is not torch.Tensor or tensors[0].numel() != 1:
        return None
    loss = tensors[0]
    is_plain = loss.grad_fn is not None and loss.is_floating_point() and is_readable(loss)
    return loss if is_plain and not is_compiled_pass() else None
