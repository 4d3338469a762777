"""Compares two recordings choice by choice, and finds the first one that differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from distdiag.moe_determinism.margins import Histogram, margins, roundings
from distdiag.moe_determinism.origin import Origins, Place
from distdiag.moe_determinism.recordings import Recording, moved
from distdiag.ranks import RankSet
from distdiag.routing_difference import Cause, Flip, MarginBin, RoutingDifference
from distdiag.routing_record import RouteRecord, Seen

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
        """Compare these."""
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


def _row(place: Place, record: RouteRecord, found: Any, flipped: Any) -> Row:  # noqa: ANN401
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


def unmatched(first: Recording, again: Recording) -> Iterator[str]:
    """Yield why two recordings cannot be compared as wholes."""
    for name, run in (("first", first), ("second", again)):
        if not run.num_choices:
            yield (
                f"no router was seen in the {name} run: no module whose name or parts are those of "
                "a router chose experts by topk, max or argmax in a model that is trained"
            )
            return
    if first.num_steps != again.num_steps:
        yield f"the runs made different numbers of steps: {first.num_steps} and {again.num_steps}"
