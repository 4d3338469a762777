"""Gradients and changes of parameters in two runs, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from distdiag.disparity import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.recorded_run import Array, RecordedRun
from distdiag.parity.tolerance import Common, Exactness, Measured, in_common, judge, measure
from distdiag.recording import Kind

MOST_EXPLAINED: Final = 24
MOST_ELEMENTS: Final = 4_000_000
FLIPPED: Final = 0.005
"""Optimizers that divide by the size of a gradient turn elements near zero round by chance."""


class Tensors:
    """The tensors of a run beside those of its reference and of its repeats."""

    def __init__(
        self,
        reference: RecordedRun,
        repeats: Sequence[RecordedRun],
        candidate: RecordedRun,
        not_compared: dict[str, str],
    ) -> None:
        """Compare these; what cannot be compared goes into `not_compared`, with why."""
        self._reference = reference
        self._repeats = repeats
        self._candidate = candidate
        self._not_compared = not_compared

    def pairs(self, kind: Kind, step: int) -> Iterator[Pair]:
        """Yield the gradients of a step in backward order, or its changes of parameters."""
        names = self._reference.names(kind, step)
        in_order = reversed(names) if kind is Kind.GRADIENT else names
        found = (self._measured(kind, step, name) for name in in_order)
        measured = [each for each in found if each is not None]
        common, num_kept = in_common(measured), 0
        for each in measured:
            difference = judge(each, common)
            if kind is Kind.PARAMETER and difference.ratio > 1:
                difference = self._by_chance(step, each.name, common) or difference
            arrays: tuple[Array, Array] = (np.empty(0), np.empty(0))
            if difference.ratio > 1 and each.num_elements <= MOST_ELEMENTS:
                num_kept += 1
                if num_kept <= MOST_EXPLAINED:
                    arrays = self._both(kind, step, each.name)
            yield Pair(difference, *arrays)

    def gradients(self, step: int) -> list[Pair]:
        """Return the gradients of a step that are no larger than can be explained."""
        found, room = [], MOST_ELEMENTS
        for name in self._reference.names(Kind.GRADIENT, step):
            ours = self._reference.whole(Kind.GRADIENT, step, name)
            theirs = self._candidate.whole(Kind.GRADIENT, step, name)
            if ours is None or theirs is None or ours.shape != theirs.shape or ours.size > room:
                continue
            room -= ours.size
            none = Difference(name=name, measured=0.0, bound=0.0, ratio=0.0)
            found.append(Pair(none, ours, theirs))
        return found

    def _measured(
        self, kind: Kind, step: int, name: str, *, has_flips: bool = True
    ) -> Measured | None:
        reference = _tensor(self._reference, kind, step, name)
        candidate = _tensor(self._candidate, kind, step, name)
        repeats = [_tensor(run, kind, step, name) for run in self._repeats]
        if reference is None or candidate is None or reference.shape != candidate.shape:
            if kind is Kind.GRADIENT:
                self._not_compared.setdefault(
                    name, f"its gradient was not recorded wholly in {self._candidate.label}"
                )
            return None
        known = [each for each in repeats if each is not None]
        own, computed = self._reference.unit(kind, step, name), self._reference.compute_unit
        error = own
        if kind is Kind.PARAMETER:
            error *= self._rounding_of_changes(step, name, reference)
        if not has_flips:
            candidate, *known = (_without_flips(reference, each) for each in (candidate, *known))
        exactness = Exactness(max(own, computed), error, computed)
        return measure(name, reference, candidate, known, exactness)

    def _by_chance(self, step: int, name: str, common: Common) -> Difference | None:
        """Return the difference of a change without the few elements that chance turns round.

        None if it is too large even so.
        """
        typical = self._measured(Kind.PARAMETER, step, name, has_flips=False)
        found = None if typical is None else judge(typical, common)
        return None if found is None or found.ratio > 1 else found

    def _both(self, kind: Kind, step: int, name: str) -> tuple[Array, Array]:
        reference = _tensor(self._reference, kind, step, name)
        candidate = _tensor(self._candidate, kind, step, name)
        assert reference is not None and candidate is not None, name
        return reference, candidate

    def _rounding_of_changes(self, step: int, name: str, change: Array) -> float:
        """Return how many units of a change one unit of the parameter itself is."""
        whole = self._reference.whole(Kind.PARAMETER, step, name)
        size = float(np.linalg.norm(change))
        return 1.0 if whole is None or not size else 1 + float(np.linalg.norm(whole)) / size


def _tensor(run: RecordedRun, kind: Kind, step: int, name: str) -> Array | None:
    whole = run.whole(kind, step, name)
    if whole is None or kind is Kind.GRADIENT:
        return whole
    before = run.whole(Kind.PARAMETER, step - 1, name) if step else run.whole(Kind.START, 0, name)
    return None if before is None else whole - before


def _without_flips(reference: Array, other: Array) -> Array:
    """Return `other` with its few elements that are furthest off put right.

    The first step of Adam is as large for an element that is all rounding as for any other, with
    the sign that rounding gave it: one run more does not tell which of them will be so.
    """
    number = min(math.ceil(FLIPPED * reference.size) + 2, reference.size // 4)
    if not number:
        return other
    furthest = np.argpartition(np.abs(other - reference), -number, axis=None)[-number:]
    typical = other.copy()
    typical.flat[furthest] = reference.flat[furthest]
    return typical
