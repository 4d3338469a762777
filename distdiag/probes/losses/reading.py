"""Reads how much the elements of a loss weigh, from the gradient that reaches it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch

from distdiag.events.losses import Factor, LossPass
from distdiag.probes.guard import guard
from distdiag.probes.losses.aux_terms import Aux
from distdiag.probes.losses.labels import Counts, num_first
from distdiag.probes.losses.terms import Scalar, Term, number
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Pending, contents

_TOLERANCE: Final = 1e-3


class LossReading:
    """The losses of one backward pass, and what is found out while it runs."""

    def __init__(
        self,
        terms: Sequence[Term],
        place: int,
        fail: Callable[[Exception], None],
        labels: Sequence[Counts] = (),
        aux: Sequence[Aux] = (),
        targets: Counts | None = None,
    ) -> None:
        """Watch the nodes of these losses until `end`.

        `labels` may be what they score; `targets`, shifted already, are what the model was given.
        """
        self._terms = list(terms)
        self._aux = list(aux)
        self._labels = [*labels, *([] if targets is None else [targets])]
        self._has_targets = targets is not None
        self._place = place
        self._fail = fail
        self._gradients: dict[int, tuple[Scalar, Scalar, Scalar]] = {}
        self._pending: Pending | None = None
        self._result: LossPass | None = None
        self._is_done = not terms
        self._handles = [
            term.node.register_prehook(self._prehook(index, term))
            for index, term in enumerate(terms)
        ]

    def _prehook(self, index: int, term: Term) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def prehook(gradients: Sequence[torch.Tensor | None]) -> None:
            with guard(self._fail):
                gradient = gradients[0]
                if gradient is not None and is_readable(gradient):
                    self._gradients[index] = _read(gradient, term)

        return prehook

    def end(self, injected: Sequence[Aux] = ()) -> None:
        """Leave the graph; begin to bring over what a device has computed.

        `injected` are auxiliary losses that the pass has come by beside its own.
        """
        self._aux += injected
        while self._handles:
            self._handles.pop().remove()
        self._terms = [replace(term, node=None, valid=None) for term in self._terms]
        if self._is_done:
            return
        if len(self._gradients) < len(self._terms):
            self._is_done = True
        else:
            self._pending = contents([each for each in self._scalars() if _is_tensor(each)])

    def take(self, *, may_wait: bool = False) -> bool:
        """Say whether the result is there."""
        if self._is_done or self._pending is None:
            return True
        found = self._pending.wait() if may_wait else self._pending.take()
        if found is None:
            return False
        self._is_done = True
        if all(content is not None for content in found):
            values = iter([content.mean for content in found if content is not None])
            self._result = self._combine(
                [v if not _is_tensor(v) else next(values) for v in self._scalars()]
            )
        self._terms.clear()
        self._gradients.clear()
        return True

    @property
    def result(self) -> LossPass | None:
        """What was found, None if the loss is not of a kind that can be read."""
        return self._result

    # One number after the other, in an order of its own

    def _scalars(self) -> Iterator[Any]:
        for index, term in enumerate(self._terms):
            yield from self._gradients[index]
            yield term.num_counted
            yield term.divisor
            for step in term.steps:
                yield step.value
            yield from term.doubts
            yield term.label_sum
        for counts in self._labels:
            yield from counts[3:]
        for each in self._aux:
            yield from each.scalars()

    def _combine(self, values: Sequence[float]) -> LossPass | None:
        left = iter(values)
        passes, label_sum = [], 0.0
        for term in self._terms:
            passes.append(_resolve(term, left))
            label_sum += next(left)
        labels = [Counts(*each[:3], *(next(left) for _ in each[3:])) for each in self._labels]
        aux = tuple(t for t in [each.resolve(left) for each in self._aux] if t)
        targets = labels.pop() if self._has_targets else None
        for kind in ("nll", "pixels", "masked", "dense"):
            mine = [p for term, p in zip(self._terms, passes, strict=True) if term.kind == kind]
            if mine:
                found = None if None in mine else _sum([p for p in mine if p], self._place)
                if found is None:
                    return None
                found = msgspec.structs.replace(found, aux=aux)
                return _with_labels(found, *num_first(labels, found, label_sum), targets)
        return None


def _with_labels(
    found: LossPass, num_first: int, num_shifted: int, targets: Counts | None
) -> LossPass:
    found = msgspec.structs.replace(found, num_first=num_first, num_shifted=num_shifted)
    if targets is None or found.kind != "nll":
        return found
    return msgspec.structs.replace(
        found, num_targets=int(float(targets.num_all)), num_target_rows=targets.num_rows
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _read(gradient: torch.Tensor, term: Term) -> tuple[Scalar, Scalar, Scalar]:
    """Return the greatest and the least weight, and how many elements have one."""
    wide = gradient.detach().double()
    if term.valid is None:
        weight = number(wide.sum())
        return weight, weight, -1.0
    has_weight = term.valid.reshape(wide.shape) & (wide != 0)
    if not wide.numel():
        return 0.0, 0.0, 0.0
    greatest = torch.where(has_weight, wide, -math.inf).amax()
    least = torch.where(has_weight, wide, math.inf).amin()
    return number(greatest), number(least), number(has_weight.sum())


def _resolve(term: Term, values: Iterator[float]) -> LossPass | None:
    greatest, least, count = (next(values) for _ in range(3))
    num_counted, divisor = next(values), next(values)
    steps = [Factor(step.op, next(values), step.num_terms, step.is_float) for step in term.steps]
    is_sure = all([bool(next(values)) for _ in term.doubts])
    count = num_counted if count < 0 else count
    if not is_sure or math.isnan(count):
        return None
    weight = 0.0
    if count:
        if not math.isfinite(greatest) or abs(greatest - least) > _TOLERANCE * abs(greatest):
            return None
        weight = abs(greatest) / divisor if divisor else 0.0
        for step in steps[term.num_outer :]:
            weight = weight / step.value if step.op == "/" else weight * step.value
    return LossPass(
        term.kind,
        term.reduction,
        int(count),
        term.num_elements,
        term.num_rows,
        abs(weight),
        tuple(steps),
    )


def _sum(passes: Sequence[LossPass], place: int) -> LossPass | None:
    """Take the parts of one loss together, if all their elements weigh the same."""
    weights = [each.weight for each in passes if each.num_counted]
    if weights and max(weights) - min(weights) > _TOLERANCE * max(weights):
        return None
    first = passes[0]
    if len(passes) > 1 and first.reduction == "mean":
        return None  # means of parts, such as sequences, are averaged on purpose
    same = all(each.factors == first.factors for each in passes)
    return LossPass(
        first.kind,
        first.reduction,
        sum(each.num_counted for each in passes),
        sum(each.num_elements for each in passes),
        sum(each.num_rows for each in passes) if all(each.num_rows for each in passes) else 0,
        weights[0] if weights else 0.0,
        first.factors if same else (),
        place,
    )
