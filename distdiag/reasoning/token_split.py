"""Whether a split gives each token to one rank, and which ranks have parts that they should not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.reasoning.token_orders import Parts, best_layout, part_phrase
from distdiag.reasoning.token_places import ByRank, counts_of, rows, shape_fault, spoilt


def split_faults(by_rank: ByRank) -> Iterator[TokenFault]:
    """Yield tokens that came to no rank or to several."""
    shape = shape_fault(by_rank, "split")
    found = [shape] if shape is not None else list(spoilt(by_rank, "split"))
    if found:
        yield from found
        return
    spec = next(iter(by_rank.values())).spec
    lost, twice = counts_of(chain.from_iterable(one.parts for one in by_rank.values()), spec)
    if not lost and not twice:
        return
    culprits, how = _culprits(by_rank)
    whole = set(range(spec.num_tokens))
    if len(by_rank) > 1 and all(whole <= set(one.parts) for one in by_rank.values()):
        how = "every rank has the whole sequence: nothing is split"
    for kind, tokens, what in (
        (FaultKind.LOST, lost, "came to no rank"),
        (FaultKind.DUPLICATED, twice, "came to several ranks, or to one several times"),
    ):
        if tokens:
            said = f"{tokens_phrase(spec, tokens)} {what}; {how}"
            yield TokenFault(
                kind=kind, stage="split", ranks=culprits, tokens=tuple(tokens), said=said
            )


def _first_rows(by_rank: ByRank) -> Parts:
    return tuple(rows(one, "split")[0] for one in by_rank.values())


def _culprits(by_rank: ByRank) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose parts do not fit the layout of most, and what the first has."""
    spec = next(iter(by_rank.values())).spec
    layout = best_layout(_first_rows(by_rank), spec.length)
    return _unlike(by_rank, layout.parts, layout.fitting) or (
        tuple(by_rank),
        "the rows are not split alike",
    )


def _unlike(
    by_rank: ByRank, wanted: Parts, fitting: tuple[int, ...]
) -> tuple[tuple[int, ...], str] | None:
    ranks, parts = tuple(by_rank), _first_rows(by_rank)
    wrong = [index for index in range(len(ranks)) if index not in fitting]
    if not wrong:
        return None
    index = wrong[0]
    how = f"rank {ranks[index]}: {part_phrase(parts[index], index, wanted, ranks)}"
    return tuple(ranks[i] for i in wrong), how


def moved_ranks(by_rank: ByRank) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that have the parts of others, if a gather only joins what they have."""
    parts = _first_rows(by_rank)
    joined = tuple(chain.from_iterable(parts))
    if any(rows(one, "gather")[0] != joined for one in by_rank.values()):
        return None
    layout = best_layout(parts, next(iter(by_rank.values())).spec.length)
    if set(parts) != set(layout.parts) or layout.name not in ("contiguous", "even"):
        return None
    return _unlike(by_rank, layout.parts, layout.fitting)
