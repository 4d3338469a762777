"""Gradients and changes of parameters in two runs, tensor by tensor."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.rank_files import Recorded
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.slots import num_cores
from distdiag.parity.tolerance import (
    MARGIN,
    Common,
    Exactness,
    Measured,
    difference_of,
    distances,
    in_common,
    measure,
)
from distdiag.record.recording import Kind

# The norm by which gradients were clipped, against that of the whole gradients.

ACCURACY: Final = 1e-3
"""Kernels that sum up squares in float32 are better than this; a wrong norm is far worse."""


def norm_pairs(reference: RecordedRun, candidate: RecordedRun, step: int) -> Iterator[Pair]:
    """Yield the norm that clipping used, as a multiple of that of all gradients.

    Whatever is clipped, that multiple is the same on any number of ranks.
    """
    ours, theirs = _multiple(reference, step), _multiple(candidate, step)
    if ours is None or theirs is None:
        return
    names = reference.names(Kind.GRADIENT, step)
    units = (reference.unit(Kind.GRADIENT, step, name) for name in names)
    bound = max(ACCURACY, MARGIN * max(units))
    factor = theirs / ours
    difference = Difference(
        name="norm that clipping used",
        measured=abs(factor - 1),
        bound=bound,
        ratio=abs(factor - 1) / bound,
        factor=factor,
    )
    yield Pair(difference, np.array([ours, ours]), np.array([theirs, theirs]))


def _multiple(run: RecordedRun, step: int) -> float | None:
    """Return the used norm over the norm of the whole gradients, of the rank furthest from one."""
    used = [r.values[0] for r in run.by_rank(Kind.NORM, step, 0, "norm").values() if r.values]
    norms = [float(value) for value in used if isinstance(value, int | float)]
    whole = [run.whole(Kind.GRADIENT, step, name) for name in run.names(Kind.GRADIENT, step)]
    if not norms or not whole or any(each is None for each in whole):
        return None
    size = math.sqrt(sum(float(np.vdot(each, each)) for each in whole if each is not None))
    if not size or not all(map(math.isfinite, norms)) or min(norms) <= 0:
        return None
    return max((norm / size for norm in norms), key=lambda multiple: abs(math.log(multiple)))


# The learning rates of two runs. Nothing rounds them, so any difference is one.

_SAME: Final = 1e-6


class Rates:
    """The learning rates of all groups of parameters."""

    def __init__(self, reference: RecordedRun, candidate: RecordedRun) -> None:
        self._reference = reference
        self._candidate = candidate

    def details(self, step: int) -> list[str]:
        """Say which ranks have other learning rates than the reference."""
        due = self._due(step)
        return [
            f"rank {rank} has the learning rates {values}, not {due}"
            for rank, values in self._by_rank(step).items()
            if due is not None and values != due
        ]

    def pairs(self, step: int) -> Iterator[Pair]:
        """Yield the learning rates of a step, those of the rank that is furthest off."""
        due = self._due(step) or ()
        found = [values for values in self._by_rank(step).values() if len(values) == len(due)]
        for number, rate in enumerate(due):
            others = [values[number] for values in found]
            if not rate or not others:
                continue
            other = max(others, key=lambda each: abs(each - rate))
            relative = abs(other / rate - 1)
            difference = Difference(
                name=f"learning rate of parameter group {number}",
                measured=relative,
                bound=_SAME,
                ratio=relative / _SAME if math.isfinite(relative) else math.inf,
                factor=other / rate,
            )
            yield Pair(difference, np.array([rate]), np.array([other]))

    def _due(self, step: int) -> tuple[float, ...] | None:
        return next(iter(_values(self._reference, step).values()), None)

    def _by_rank(self, step: int) -> dict[int, tuple[float, ...]]:
        return _values(self._candidate, step)


def _values(run: RecordedRun, step: int) -> dict[int, tuple[float, ...]]:
    records = run.by_rank(Kind.RATE, step, 0, "rates")
    return {
        rank: tuple(float(value) for value in record.values or () if value is not None)
        for rank, record in records.items()
    }


# Compares the tensors of one step.

MOST_EXPLAINED: Final = 24
MOST_ELEMENTS: Final = 4_000_000
MOST_THREADS: Final = 8
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
        self._leans: dict[Kind, float] = {}

    def pairs(self, kind: Kind, step: int) -> Iterator[Pair]:
        """Yield the gradients of a step in backward order, or its changes of parameters."""
        names = self._reference.names(kind, step)
        in_order = reversed(names) if kind is Kind.GRADIENT else names
        measured = list(self._all_measured(kind, step, list(in_order)))
        common, num_kept = self._common(kind, measured), 0
        for each in measured:
            difference = difference_of(each, common)
            if kind is Kind.PARAMETER and difference.ratio > 1:
                difference = self._by_chance(step, each.name, common) or difference
            num_kept += difference.ratio > 1
            if difference.ratio > 1 and num_kept <= MOST_EXPLAINED:
                yield kept(difference, *self._both(kind, step, each.name))
            else:
                yield Pair(difference, np.empty(0), np.empty(0))

    def _common(self, kind: Kind, measured: Sequence[Measured]) -> Common:
        """Return what rounding does to tensors of this kind.

        When two runs drift apart, all tensors of a step lean the same way, so that one step of one
        perturbed run says too little of how far: what an earlier step showed counts too.
        """
        common = in_common(measured)
        lean = self._leans[kind] = max(common.lean, self._leans.get(kind, 0.0))
        return common._replace(lean=lean)

    def _all_measured(self, kind: Kind, step: int, names: Sequence[str]) -> Iterator[Measured]:
        """Measure some tensors at a time; numpy lets other threads run meanwhile."""
        with ThreadPoolExecutor(min(num_cores(), MOST_THREADS)) as pool:
            found = pool.map(lambda name: self._measured(kind, step, name), names)
            for name, each in zip(names, found, strict=True):
                if isinstance(each, Measured):
                    yield each
                elif each and kind is Kind.GRADIENT:
                    self._not_compared.setdefault(name, each)

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
    ) -> Measured | str:
        """Measure a tensor, or say what is missing; the text is empty where rounding drowns it."""
        reference = _tensor(self._reference, kind, step, name)
        candidate = _tensor(self._candidate, kind, step, name)
        if reference is None or candidate is None or reference.shape != candidate.shape:
            return f"its gradient was not recorded wholly in {self._candidate.label}"
        repeats = [_tensor(run, kind, step, name) for run in self._unlike(kind, step, name)]
        known = [each for each in repeats if each is not None]
        own, computed = self._reference.unit(kind, step, name), self._reference.compute_unit
        error = own
        if kind is Kind.PARAMETER:
            error *= self._rounding_of_changes(step, name, reference)
        if not has_flips:
            candidate, *known = (_without_flips(reference, each) for each in (candidate, *known))
        exactness = Exactness(max(own, computed), error, computed, step)
        return measure(name, reference, candidate, known, exactness) or ""

    def _unlike(self, kind: Kind, step: int, name: str) -> list[RecordedRun]:
        """Return the repeats that have to be read: of another one all digests are the same."""
        places = [(kind, step)]
        if kind is Kind.PARAMETER:
            places.append(_before(step))
        ours = [self._reference.digest(*place, name) for place in places]
        others, perturbed = self._repeats[:-1], self._repeats[-1:]
        found = [
            run
            for run in others
            if not all(ours) or ours != [run.digest(*place, name) for place in places]
        ]
        return [*found, *perturbed]

    def _by_chance(self, step: int, name: str, common: Common) -> Difference | None:
        """Return the difference of a change without the few elements that chance turns round.

        None if it is too large even so.
        """
        typical = self._measured(Kind.PARAMETER, step, name, has_flips=False)
        found = difference_of(typical, common) if isinstance(typical, Measured) else None
        return None if found is None or found.ratio > 1 else found

    def _both(self, kind: Kind, step: int, name: str) -> tuple[Recorded, Recorded]:
        reference = _tensor(self._reference, kind, step, name)
        candidate = _tensor(self._candidate, kind, step, name)
        assert reference is not None and candidate is not None, name
        return reference, candidate

    def _rounding_of_changes(self, step: int, name: str, change: Recorded) -> float:
        """Return how many units of a change one unit of the parameter itself is."""
        whole = self._reference.as_recorded(Kind.PARAMETER, step, name)
        size, _ = distances(change, ())
        return 1.0 if whole is None or not size else 1 + distances(whole, ())[0] / size


def kept(found: Difference, reference: Recorded, candidate: Recorded) -> Pair:
    """Keep the values with what was measured, unless they are too large to be explained by."""
    if reference.size > MOST_ELEMENTS:
        return Pair(found, np.empty(0), np.empty(0))
    return Pair(found, reference.astype(np.float64), candidate.astype(np.float64))


def _before(step: int) -> tuple[Kind, int]:
    return (Kind.PARAMETER, step - 1) if step else (Kind.START, 0)


def _tensor(run: RecordedRun, kind: Kind, step: int, name: str) -> Recorded | None:
    whole = run.as_recorded(kind, step, name)
    if whole is None or kind is Kind.GRADIENT:
        return whole
    before = run.as_recorded(*_before(step), name)
    return None if before is None else whole - before


def _without_flips(reference: Recorded, other: Recorded) -> Recorded:
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
