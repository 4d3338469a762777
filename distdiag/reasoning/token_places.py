"""What stands at the places of a split or gathered sequence, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.sequence_event import FOREIGN, MIXED, TokenPassport, TokenSpec

ByRank = Mapping[int, TokenPassport]

_SPOILT: Final = (
    (FOREIGN, FaultKind.FOREIGN, "values that belong to no token"),
    (MIXED, FaultKind.MIXED, "channels of several tokens, or in another order"),
)


def seen(one: TokenPassport, stage: str) -> tuple[int, ...]:
    """Return the places of all rows after the split or the gather."""
    return one.parts if stage == "split" else one.gathered


def rows(one: TokenPassport, stage: str) -> list[tuple[int, ...]]:
    """Return the tokens of each row, without what is no token."""
    places = seen(one, stage)
    size = len(places) // one.spec.batch
    cut = [places[row * size : (row + 1) * size] for row in range(one.spec.batch)]
    return [tuple(token for token in row if token >= 0) for row in cut]


def counts_of(places: Iterator[int] | tuple[int, ...], spec: TokenSpec) -> tuple[list[int], ...]:
    """Return the tokens that are at none of these places, and those that are at several."""
    counts = Counter(places)
    tokens = range(spec.num_tokens)
    return [t for t in tokens if not counts[t]], [t for t in tokens if counts[t] > 1]


def shape_fault(by_rank: ByRank, stage: str) -> TokenFault | None:
    """Return the fault of ranks whose tensor was cut or joined along another dimension."""
    shapes = {
        rank: one.part_shape if stage == "split" else one.gathered_shape
        for rank, one in by_rank.items()
    }
    spec = next(iter(by_rank.values())).spec
    wrong = [rank for rank, shape in shapes.items() if _other_dims(spec, shape)]
    if not wrong:
        return None
    shape = shapes[wrong[0]]
    dims = " and ".join(map(str, _other_dims(spec, shape)))
    return TokenFault(
        kind=FaultKind.WRONG_DIM,
        stage=stage,
        ranks=tuple(wrong),
        tokens=tuple(range(spec.num_tokens)),
        said=f"it {'cuts' if stage == 'split' else 'joins'} dim {dims} instead of dim {spec.dim}: "
        f"the whole is {list(spec.shape)}, it returns {list(shape)}",
    )


def _other_dims(spec: TokenSpec, shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions but that of the sequence in which a shape is not the full one."""
    if len(shape) != len(spec.shape):
        return list(range(len(spec.shape)))
    return [i for i, size in enumerate(shape) if size != spec.shape[i] and i != spec.dim]


def spoilt(by_rank: ByRank, stage: str) -> Iterator[TokenFault]:
    """Yield places that hold what is no token, if a token is missing for that."""
    spec = next(iter(by_rank.values())).spec
    if stage == "split":
        lost, _ = counts_of(chain.from_iterable(one.parts for one in by_rank.values()), spec)
        if not lost:
            return  # more places than tokens: padding, whatever its value
    for mark, kind, what in _SPOILT:
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, one in by_rank.items():
            if stage == "gather" and not counts_of(one.gathered, spec)[0]:
                continue
            places = _numbered(spec, seen(one, stage), mark)
            if places:
                ranks.setdefault(places, []).append(rank)
        for places, those in ranks.items():
            where = tokens_phrase(spec, places).replace("tokens", "places")
            said = f"{where.replace('token', 'place')} held {what}"
            yield TokenFault(kind=kind, stage=stage, ranks=tuple(those), tokens=places, said=said)


def _numbered(spec: TokenSpec, places: tuple[int, ...], mark: int) -> tuple[int, ...]:
    """Return where a mark stands, numbered as the tokens of whole rows are."""
    size = len(places) // spec.batch
    found = {
        row * spec.length + min(place, spec.length - 1)
        for row in range(spec.batch)
        for place in range(size)
        if places[row * size + place] == mark
    }
    return tuple(sorted(found))
