"""Compares two recordings choice by choice, and finds the first one that differs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from distdiag.events.comparisons import Cause, Flip, MarginBin, Nature, Origin, RoutingDifference
from distdiag.events.ranks import RankSet
from distdiag.parity.rank_files import UNIT, Array
from distdiag.parity.routing.recordings import Choices, Flags, Recording, moved
from distdiag.record.recording import RouteRecord, Seen
from distdiag.record.unordered_ops import BACKWARD, FORWARD

# How far the scores lie apart at the boundary of a choice, counted in roundings.

MOST_ROUNDINGS: Final[Mapping[str, float]] = {
    "float64": 4096.0,
    "float32": 1024.0,
    "float16": 8.0,
    "bfloat16": 4.0,
}
"""So many units another order of the same additions may change a result.

Sums in float16 and bfloat16 are accumulated in a finer type and rounded once.
"""
EDGES: Final = (0.0, *(2.0**n for n in (0, 2, 4, 6, 8, 10, 13, 16, 18, 21)), float("inf"))


def bound(dtypes: Iterable[str]) -> float:
    """Return how far apart, relative to the largest value, rounding in these types may bring."""
    known = [UNIT[name] * MOST_ROUNDINGS[name] for name in dtypes if name in UNIT]
    return max(known, default=UNIT["float32"] * MOST_ROUNDINGS["float32"])


def margins(choices: Choices) -> Array:
    """Return for each token by how much the choice was made; infinite where all were chosen."""
    with np.errstate(invalid="ignore"):
        found = choices.inner - choices.outer
    return np.where(np.isnan(found), 0.0, found)


def roundings(margin: Array, size: Array, dtype: str) -> Array:
    """Return margins in units of rounding of the largest score of each token."""
    unit = UNIT.get(dtype, UNIT["float32"]) * size
    return np.where(margin <= 0, 0.0, margin / np.where(unit > 0, unit, 1.0))


class Histogram:
    """Counts tokens and flipped tokens by margin."""

    def __init__(self, dtypes: Iterable[str]) -> None:
        self._bound = bound(dtypes)
        self._limit = 0.0
        self._tokens = np.zeros(len(EDGES), np.int64)
        self._flipped: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def add(self, step: int, found: Array, dtype: str, flipped: Flags) -> None:
        """Count tokens with these margins, in roundings of their scores."""
        self._limit = max(self._limit, self._bound / UNIT.get(dtype, UNIT["float32"]))
        places = np.searchsorted(np.array(EDGES), found)
        self._tokens += np.bincount(places, minlength=len(EDGES))
        if flipped.any():
            counts = np.bincount(places[flipped], minlength=len(EDGES))
            self._flipped[step] = self._flipped.get(step, 0) + counts

    def bins(self) -> tuple[MarginBin, ...]:
        """Return the counts."""
        none = np.zeros(len(EDGES), np.int64)
        first = self._flipped[min(self._flipped)] if self._flipped else none
        flipped = sum(self._flipped.values(), none)
        return tuple(
            MarginBin(
                up_to=edge,
                num_tokens=int(self._tokens[place]),
                num_flipped=int(flipped[place]),
                num_flipped_first=int(first[place]),
                is_numeric=edge <= self._limit,
            )
            for place, edge in enumerate(EDGES)
        )


# Finds what differs first in two recordings, and how far apart it is.

_MOST_NAMES: Final = 3
_OF_TORCH: Final = ("cpu", "cuda")


class Place(NamedTuple):
    """When something was recorded; what differs first comes first."""

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


def _cause(origin: Origin, nature: Nature, place: Place, name: str, **more: object) -> Cause:
    at = {"rank": place.rank, "step": place.step, "micro": place.micro}
    return msgspec.convert({**at, "origin": origin, "nature": nature, "name": name, **more}, Cause)


def _tail(name: str) -> str:
    """Return a name as the user knows it, without that of the model."""
    model, _, rest = name.partition("/")
    return rest or model


# Compares two recordings, choice by choice.

_MOST_FLIPS: Final = 10_000


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of both runs, for a table."""

    step: int
    micro: int
    rank: int
    layer: str
    call: int
    number: int
    is_recompute: bool
    num_tokens: int
    num_flipped: int
    num_near: int
    least_margin: float
    greatest_flipped: float


class FlipRow(msgspec.Struct, frozen=True, kw_only=True):
    """One flipped token, for a table."""

    step: int
    micro: int
    rank: int
    layer: str
    call: int
    number: int
    flip: Flip


class Result(NamedTuple):
    """What came of a comparison; `problem` says why there was none."""

    rows: list[Row]
    flips: list[FlipRow]
    margins: tuple[MarginBin, ...]
    difference: RoutingDifference | None
    cause: Cause | None
    problem: str = ""


class _Differing(NamedTuple):
    place: Place
    record: RouteRecord
    flip: Flip | None
    num_flipped: int


class Comparison:
    """Compares a run with the same run again."""

    def __init__(self, first: Recording, again: Recording) -> None:
        self._first = first
        self._again = again
        self._histogram = Histogram(first.dtypes())
        self._rows: list[Row] = []
        self._flips: list[FlipRow] = []
        self._differing: list[_Differing] = []
        self._problem = ""

    def run(self) -> Result:
        """Return what differs."""
        origins = Origins(self._first, self._again)
        for rank in self._first.records:
            self._compare_rank(rank, origins)
        cause = origins.cause(self._moves())
        difference = None
        if self._differing and cause is not None:
            difference = self._difference(cause)
        return Result(
            self._rows,
            self._flips,
            self._histogram.bins(),
            difference,
            cause,
            "" if cause is not None else self._problem,
        )

    def _compare_rank(self, rank: int, origins: Origins) -> None:
        others = {record.key: record for record in self._again.records.get(rank, ())}
        for number, record in enumerate(self._first.records[rank]):
            other = others.pop(record.key, None)
            if other is None:
                self._lack(rank, record)
                continue
            place = Place(record.step, record.micro, number, rank)
            origins.see(place, record, other)
            if record.seen is Seen.CHOICE:
                self._compare_choice(place, record, other)
        for record in others.values():
            self._lack(rank, record)

    def _lack(self, rank: int, record: RouteRecord) -> None:
        """Take note of a choice that one of the runs alone has made."""
        if record.seen is Seen.CHOICE and not self._problem:
            self._problem = (
                f"rank {rank} chooses in {record.name} at step {record.step} in one of the runs "
                "only, although nothing differs before that"
            )

    def _compare_choice(self, place: Place, record: RouteRecord, other: RouteRecord) -> None:
        assert record.choice is not None and other.choice is not None
        if record.choice != other.choice:
            number = max(record.choice.num_tokens, other.choice.num_tokens)
            self._differing.append(_Differing(place, record, None, number))
            return
        mine = self._first.choices(place.rank, record)
        theirs = self._again.choices(place.rank, other)
        experts, experts_again = np.sort(mine.indices, -1), np.sort(theirs.indices, -1)
        flipped = (experts != experts_again).any(-1)
        margin = margins(mine)
        found = roundings(margin, mine.size, record.dtype)
        again = margins(theirs)
        found = np.where(
            flipped, np.maximum(found, roundings(again, theirs.size, record.dtype)), found
        )
        margin = np.where(flipped, np.maximum(margin, again), margin)
        self._histogram.add(record.step, found, record.dtype, flipped)
        self._rows.append(_row(place, record, found, flipped))
        flips = [
            Flip(
                token=int(token),
                experts=tuple(map(int, experts[token])),
                experts_again=tuple(map(int, experts_again[token])),
                margin=float(margin[token]),
                roundings=float(found[token]),
            )
            for token in np.flatnonzero(flipped)[: _MOST_FLIPS - len(self._flips) + 1]
        ]
        if flips:
            self._differing.append(_Differing(place, record, flips[0], int(flipped.sum())))
        self._flips += (_flip_row(place, record, flip) for flip in flips)

    def _moves(self) -> float:
        """Return by how much the scores at the boundary moved in the first differing choice."""
        if not self._differing:
            return -1.0
        place, record, *_ = min(self._differing)
        other = next(r for r in self._again.records[place.rank] if r.key == record.key)
        return moved(self._first, self._again, place.rank, record, other)

    def _difference(self, cause: Cause) -> RoutingDifference:
        place, record, flip, num_flipped = min(self._differing)
        assert record.choice is not None
        culprits = [each.place.rank for each in self._differing if each.record.key == record.key]
        return RoutingDifference(
            rank=place.rank,
            seq=0,
            time_ns=0,
            step=record.step,
            layer=record.name.partition("/")[2] or record.name,
            micro=record.micro,
            call=record.call,
            number=record.number,
            is_recompute=record.is_recompute,
            choice=record.choice,
            flip=flip,
            num_flipped=num_flipped,
            cause=cause,
            margins=self._histogram.bins(),
            num_compared=len(self._rows),
            num_different=len(self._differing),
            culprits=RankSet(culprits),
        )


def _where(place: Place, record: RouteRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "micro": record.micro,
        "rank": place.rank,
        "layer": record.name,
        "call": record.call,
        "number": record.number,
    }


def _row(place: Place, record: RouteRecord, found: Array, flipped: Flags) -> Row:
    return Row(
        **_where(place, record),
        is_recompute=record.is_recompute,
        num_tokens=len(found),
        num_flipped=int(flipped.sum()),
        num_near=int((found <= 1.0).sum()),
        least_margin=float(found.min()),
        greatest_flipped=float(np.max(found[flipped], initial=-1.0)),
    )


def _flip_row(place: Place, record: RouteRecord, flip: Flip) -> FlipRow:
    return FlipRow(**_where(place, record), flip=flip)
