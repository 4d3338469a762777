"""Finds the auxiliary losses of a backward pass, and by what each of them is multiplied."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from distdiag.events.losses import AuxTerm, Factor
from distdiag.probes.losses.score_marks import Origin, inputs_of, origin_of
from distdiag.probes.losses.terms import SAME, Scalar, Step, Term, kind_of, number, saved
from distdiag.probes.untyped import Untyped

MOST_NODES: Final = 64
_MOST_TERMS: Final = 8
_LEAST: Final = 0.25
"""Of the tokens of a batch so many are no padding, at least."""
_ROUNDING: Final = 1e-3

_Steps = tuple[Step, ...]
_Edges = list[tuple[Any, int, _Steps]]


@dataclass(frozen=True, slots=True)
class Aux:
    """A term of a loss that is made of the scores of routers; its factors from the root on.

    The first `num_outer` factors are also those of other terms. Of one that `is_injected` the first
    factor divides by what its gradient is a part of: the number of micro-steps, as a rule.
    """

    origin: Origin
    steps: _Steps
    num_outer: int
    is_injected: bool = False

    def scalars(self) -> Iterator[Scalar]:
        """Yield the numbers that are to be read."""
        yield from (step.value for step in self.steps)
        yield from self.origin.divisors

    def resolve(self, values: Iterator[float]) -> AuxTerm | None:
        """Say what was found, when the numbers have been read; None if that tells nothing."""
        factors = tuple(Factor(step.op, next(values), step.num_terms) for step in self.steps)
        divisors = [next(values) for _ in self.origin.divisors]
        if self.is_injected:
            share = factors[0].value
            if not math.isfinite(share) or share < 1 - _ROUNDING or not _is_whole(share):
                return None
            factors = (Factor("/", float(round(share))), *factors[1:])
        mark = next(iter(self.origin.marks.values()))
        is_mean = self._is_mean(divisors)
        return AuxTerm(mark.layer, factors, self.num_outer, is_mean)

    def _is_mean(self, divisors: list[float]) -> bool:
        """Say whether the number of this rank's tokens was divided by, and no greater one."""
        origin = self.origin
        num_rows = max(mark.num_rows for mark in origin.marks.values())
        most = num_rows * len(origin.marks)
        is_mean = math.prod(origin.sizes) >= num_rows
        is_mean = is_mean or any(_LEAST * num_rows <= each <= most for each in divisors)
        return origin.is_clear and is_mean and not any(each > most for each in divisors)


def without_aux(terms: list[Term]) -> list[Term]:
    """Leave out what is made of the scores of routers, unless that is all."""
    dense = [term for term in terms if term.kind == "dense"]
    aux = {id(term) for term in dense if origin_of(term.node) is not None}
    return [term for term in terms if id(term) not in aux] if len(aux) < len(terms) else terms


def aux_terms(root: object) -> list[Aux]:
    """Return the auxiliary losses that a pass from this node differentiates."""
    found: list[Aux] = []
    waiting: _Edges = [(root, 0, ())]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node, index, steps = waiting.pop()
        origin = origin_of(node, index)
        if origin is not None:
            found += [Aux(origin, way, len(steps)) for way in _inner(node, index, steps)]
        else:
            waiting += _below(node, index, steps) or []
    return [] if waiting or len(found) > _MOST_TERMS else found


def parts_of(node: object) -> list[_Steps]:
    """Return the factors of each part of an auxiliary loss that stands for itself."""
    return _inner(node, 0, ())


def _inner(node: object, index: int, steps: _Steps) -> list[_Steps]:
    """Return the factors of each part of an auxiliary loss; parts that are alike once."""
    found: list[_Steps] = []
    waiting: _Edges = [(node, index, steps)]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node, index, way = waiting.pop()
        below = _below(node, index, way)
        if below is None:
            if not any(_are_same(way, other) for other in found):
                found.append(way)
        else:
            waiting += below
    return found


def _below(node: Untyped, index: int, steps: _Steps) -> _Edges | None:
    """Return what a node adds up or multiplies by a number, None if it does something else."""
    kind, overload = kind_of(node)
    below = inputs_of(node, index)
    if kind in ("Neg", "Add", "Sub", "Stack", "Cat") or kind in SAME:
        return [(child, place, steps) for child, place in below]
    if kind in ("Sum", "Mean") and overload == "0" and len(below) == 1:
        if kind_of(below[0][0])[0] not in ("Stack", "Cat"):
            return None
        count = float(node._saved_self_sym_sizes[0])
        return [(*below[0], (*steps, Step("mean", count)) if kind == "Mean" else steps)]
    if kind not in ("Mul", "Div") or len(below) != 1:
        return None
    is_first = node.next_functions[0][0] is not None
    other = saved(node, "other" if is_first else "self")
    if other is None or other.numel() != 1 or (kind == "Div" and not is_first):
        return None
    return [(*below[0], (*steps, Step("/" if kind == "Div" else "*", number(other))))]


def _are_same(one: _Steps, other: _Steps) -> bool:
    return len(one) == len(other) and all(
        a.op == b.op and (a.value is b.value or _is_equal(a.value, b.value))
        for a, b in zip(one, other, strict=True)
    )


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= _ROUNDING * value


def _is_equal(one: object, other: object) -> bool:
    return isinstance(one, float) and one == other  # what a device holds is not read
