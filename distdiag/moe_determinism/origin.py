"""Finds what differs first in two recordings, and how far apart it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from distdiag.moe_determinism.margins import bound
from distdiag.moe_determinism.recordings import Recording, moved
from distdiag.routing_difference import Cause, Nature, Origin
from distdiag.routing_record import RouteRecord, Seen
from distdiag.unordered_ops import BACKWARD, FORWARD

_MOST_NAMES: Final = 3
_OF_TORCH: Final = ("cpu", "cuda")


class Place(NamedTuple):
    """When something was recorded; what differs first has the least."""

    step: int
    micro: int
    number: int
    rank: int


class _Pair(NamedTuple):
    place: Place
    record: RouteRecord
    other: RouteRecord


class Origins:
    """Remembers the first difference of both runs, and explains it."""

    def __init__(self, first: Recording, again: Recording) -> None:
        """Nothing differs yet."""
        self._runs = (first, again)
        self._pair: _Pair | None = None
        self._generators: dict[tuple[int, int], list[str]] = {}

    def see(self, place: Place, record: RouteRecord, other: RouteRecord) -> None:
        """Take in what both runs recorded at one place."""
        is_same = record.digests == other.digests and record.choice == other.choice
        if is_same:
            return
        if record.seen is Seen.RANDOM:
            # Generators that nobody seeds and nobody uses differ as well.
            names = [name for name, d in record.digests.items() if other.digests.get(name) != d]
            self._generators[place.rank, record.step] = names
        elif self._pair is None or place < self._pair.place:
            self._pair = _Pair(place, record, other)

    def cause(self, moves: float) -> Cause | None:
        """Return what differs first, None if nothing does.

        `moves` is by how much the scores differ in the first choice that does, -1 if none does.
        """
        if self._pair is None:
            return None
        record = self._pair.record
        if record.seen is Seen.WEIGHTS:
            return self._of_weights(self._pair, moves)
        if record.seen is Seen.GRADIENT:
            return self._of_gradient(self._pair, moves)
        if record.seen is Seen.CHOICE:
            return self._of_choice(self._pair, moves)
        return self._of_module(self._pair, moves)

    # By what differs

    def _of_weights(self, pair: _Pair, moves: float) -> Cause:
        place, record, other = pair
        names = [name for name, d in record.digests.items() if other.digests.get(name) != d]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        shown = ", ".join(_tail(name) for name in names[:_MOST_NAMES]) + more
        if place.step == 0:
            text = f"the runs begin with different weights: {shown}"
            details = (text, *self._seeds(place, _OF_TORCH))
            return _cause(Origin.WEIGHTS, Nature.LOGIC, place, _tail(names[0]), details=details)
        text = f"equal gradients were followed by different weights: {shown}"
        nature = self._nature(-1.0, "", moves)
        return _cause(Origin.WEIGHTS, nature, place, _tail(names[0]), details=(text,))

    def _of_gradient(self, pair: _Pair, moves: float) -> Cause:
        place, record, _ = pair
        size = self._size(pair)
        module = record.name.rpartition(".")[0]
        calls = [
            each
            for each in self._runs[0].records[place.rank]
            if each.seen is Seen.OUTPUT and each.name == module and each.step == place.step
        ]
        return _cause(
            Origin.GRADIENT,
            self._nature(size, record.dtype, moves),
            place,
            _tail(record.name),
            kind=calls[0].kind if calls else "",
            ops=tuple(op for op in (calls[0].ops if calls else ()) if op in FORWARD | BACKWARD),
            size=size,
            dtype=record.dtype,
            details=("the outputs of all modules were the same up to there",),
        )

    def _of_choice(self, pair: _Pair, moves: float) -> Cause:
        place, record, other = pair
        if record.digests.get("scores") == other.digests.get("scores"):
            text = "the scores are the same: equal ones were ordered in another way"
            return _cause(
                Origin.TIE,
                Nature.NUMERIC,
                place,
                _tail(record.name),
                kind=record.kind,
                details=(text,),
            )
        return self._of_module(pair, moves)

    def _of_module(self, pair: _Pair, moves: float) -> Cause:
        """Blame the innermost module that was given the same, or else the data."""
        place, record, other = pair
        size, dtype = self._size(pair), record.dtype
        if record.seen is Seen.CHOICE:
            record, other = self._around(place.rank, record, other) or (record, other)
        while record.digests.get("given") != other.digests.get("given"):
            around = self._around(place.rank, record, other)
            if around is None and record.is_recompute:
                text = f"in a repeated forward pass, before {_tail(record.name)}"
                nature = self._nature(size, dtype, moves)
                return _cause(Origin.UNKNOWN, nature, place, "", details=(text,))
            if around is None:
                return self._of_data(place)
            record, other = around
        ops = tuple(op for op in record.ops if op in FORWARD)
        name, kind = _tail(record.name), record.kind
        nature = self._nature(size, dtype, moves)
        # Seeded draws are the same in both runs: rounding has another reason.
        if record.is_drawn and nature is not Nature.NUMERIC:
            nature = Nature.MEANT if record.is_meant_random else nature
            details = self._seeds(place, _OF_TORCH)
            return _cause(Origin.DRAW, nature, place, name, kind=kind, details=details)
        return _cause(
            Origin.MODULE, nature, place, name, kind=kind, ops=ops, size=size, dtype=dtype
        )

    def _of_data(self, place: Place) -> Cause:
        first, again = (run.rows(place.rank) for run in self._runs)
        shared = len(first & again) / max(1, len(first))
        if not first or not again:
            text = "what the program gives the model differs"
        elif shared > 0.5:
            text = "the model is given the same samples in another order"
        elif shared > 0:
            text = f"{shared:.0%} of the samples of one run come in the other one too"
        else:
            text = "the model is given other samples"
        details = (text, *self._seeds(place, (*_OF_TORCH, "python", "numpy")))
        return _cause(Origin.DATA, Nature.LOGIC, place, "", details=details)

    # What helps

    def _around(
        self, rank: int, record: RouteRecord, other: RouteRecord
    ) -> tuple[RouteRecord, RouteRecord] | None:
        """Return the call in which a call or a choice was made, in both runs."""
        found = (
            _around(run.records[rank], one)
            for run, one in zip(self._runs, (record, other), strict=True)
        )
        mine, theirs = found
        return (mine, theirs) if mine is not None and theirs is not None else None

    def _size(self, pair: _Pair) -> float:
        place, record, other = pair
        if record.seen is Seen.CHOICE:
            return moved(*self._runs, place.rank, record, other)
        first = self._runs[0].sample(place.rank, record)
        again = self._runs[1].sample(place.rank, other)
        if not len(first) or first.shape != again.shape:
            return -1.0
        with np.errstate(invalid="ignore"):
            apart = np.abs(first - again)
        greatest = float(np.max(np.abs(first[np.isfinite(first)]), initial=0.0))
        found = float(np.max(apart[np.isfinite(apart)], initial=0.0))
        return found / greatest if greatest and found else -1.0

    def _nature(self, size: float, dtype: str, moves: float) -> Nature:
        """Say whether rounding explains a difference; where it is not known, that of the scores."""
        if size < 0:
            size, dtype = moves, ""
        types = self._runs[0].dtypes() | {dtype}
        return Nature.NUMERIC if 0 <= size <= bound(types) else Nature.LOGIC

    def _seeds(self, place: Place, names: tuple[str, ...]) -> tuple[str, ...]:
        differing = self._generators.get((place.rank, place.step), [])
        shown = [name for name in differing if name in names]
        if not shown:
            return ()
        return (f"the state of the default generators differs: {', '.join(shown)}",)


def _around(records: Sequence[RouteRecord], inner: RouteRecord) -> RouteRecord | None:
    is_choice = inner.seen is Seen.CHOICE
    name = inner.name if is_choice else inner.outer
    later = itertools.dropwhile(lambda each: each is not inner, records)
    for each in itertools.islice(later, 1, None):
        is_same_pass = each.pass_number == inner.pass_number
        if not (name and is_same_pass):
            return None
        is_around = each.seen is Seen.OUTPUT and each.name == name
        if is_around and each.is_recompute == inner.is_recompute:
            return each
    return None


def _cause(origin: Origin, nature: Nature, place: Place, name: str, **more: Any) -> Cause:  # noqa: ANN401
    at = {"rank": place.rank, "step": place.step, "micro": place.micro}
    return msgspec.convert({**at, "origin": origin, "nature": nature, "name": name, **more}, Cause)


def _tail(name: str) -> str:
    """Return a name as the user knows it, without that of the model."""
    model, _, rest = name.partition("/")
    return rest or model
