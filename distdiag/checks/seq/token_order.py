"""Whether a split and a gather keep each token once, in its order."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from distdiag.checks.seq.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import FOREIGN, MIXED, TokenSpec, TokenTrace

# What stands at the places of a split or gathered sequence, row by row.

ByRank = Mapping[int, TokenTrace]

_NO_TOKEN: Final = (
    (FOREIGN, FaultKind.FOREIGN, "values that belong to no token"),
    (MIXED, FaultKind.MIXED, "channels of several tokens, or channels in a different order"),
)


def seen(one: TokenTrace, stage: str) -> tuple[int, ...]:
    """Return the places of all rows after the split or the gather."""
    return one.parts if stage == "split" else one.gathered


def rows(one: TokenTrace, stage: str) -> list[tuple[int, ...]]:
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


def foreign_values(by_rank: ByRank, stage: str) -> Iterator[TokenFault]:
    """Yield places that hold what is no token, if a token is missing for that."""
    spec = next(iter(by_rank.values())).spec
    if stage == "split":
        lost, _ = counts_of(chain.from_iterable(one.parts for one in by_rank.values()), spec)
        if not lost:
            return  # more places than tokens: padding, whatever its value
    for mark, kind, what in _NO_TOKEN:
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


# The orders in which a sequence is dealt out to ranks, and how a wrong order reads.

Parts = tuple[tuple[int, ...], ...]


def known_layouts(length: int, num_ranks: int) -> dict[str, Parts]:
    """Return the parts of all ranks under each usual layout, by its name.

    Sequences that cannot be divided are padded behind, or dealt out as evenly as possible.
    """
    padded = -(-length // num_ranks)
    layouts = {
        "contiguous": _contiguous(length, [padded] * num_ranks),
        "even": _contiguous(
            length,
            [length // num_ranks + (rank < length % num_ranks) for rank in range(num_ranks)],
        ),
        "interleaved": tuple(tuple(range(r, length, num_ranks)) for r in range(num_ranks)),
    }
    # Head-tail: rank r has the r-th chunk from the front and the r-th from behind.
    half = -(-length // (2 * num_ranks))
    chunks = _contiguous(length, [half] * (2 * num_ranks))
    layouts["head-tail"] = tuple(chunks[r] + chunks[-1 - r] for r in range(num_ranks))
    return layouts


class Layout(NamedTuple):
    """The parts that all ranks should have, and the indices of those that have them."""

    name: str
    parts: Parts
    fitting: tuple[int, ...]


def best_layout(parts: Parts, length: int) -> Layout:
    """Return the layout that fits most ranks."""
    fits: dict[str, tuple[int, ...]] = {}
    layouts = known_layouts(length, len(parts))
    for name, wanted in layouts.items():
        fits[name] = tuple(i for i, part in enumerate(parts) if part == wanted[i])
    name = max(fits, key=lambda each: len(fits[each]))
    return Layout(name, layouts[name], fits[name])


def part_phrase(part: Sequence[int], index: int, wanted: Parts, ranks: Sequence[int]) -> str:
    """Return how a rank's part differs from the one that it should have."""
    others = [ranks[i] for i, other in enumerate(wanted) if other == tuple(part) and i != index]
    if others:
        return f"it has the part of rank {others[0]}"
    mine = wanted[index]
    if len(part) > 1 and mine and list(part) == list(range(part[0], part[-1] + 1)):
        moves = [
            f"{what} {abs(off)} {'late' if off > 0 else 'early'}"
            for what, off in (("begins", part[0] - mine[0]), ("ends", part[-1] - mine[-1]))
            if off
        ]
        if moves and list(mine) == list(range(mine[0], mine[-1] + 1)):
            return f"it has {RankSet(part)} instead of {RankSet(mine)}: it {' and '.join(moves)}"
    return f"it has {_listed(part)} instead of {_listed(mine)}"


def order_phrase(order: Sequence[int], num_ranks: int) -> str:
    """Return in which order tokens stand that should stand in ascending order."""
    length = len(order)
    order = list(order)
    if order == list(range(length - 1, -1, -1)):
        return "in reverse order"
    blocks = _block_order(order, num_ranks)
    if blocks is not None:
        return f"with the parts in the order {', '.join(map(str, blocks))}"
    layouts = known_layouts(length, num_ranks)
    for name in ("head-tail", "interleaved"):
        dealt = list(chain.from_iterable(layouts[name]))
        if order == dealt:
            return f"in {name} order, which is not undone"
        if [dealt[place] for place in order] == list(range(length)):
            return f"as if they had been in {name} order, which they were not"
    if length and order == [(place + order[0]) % length for place in range(length)]:
        return f"rotated by {order[0]} tokens"
    place = next(i for i, token in enumerate(order) if token != i)
    return f"in a different order: token {order[place]} is the first wrong one, at place {place}"


def _block_order(order: list[int], num_blocks: int) -> list[int] | None:
    size, rest = divmod(len(order), num_blocks)
    if rest or not size:
        return None
    firsts = order[::size]
    if any(first % size for first in firsts):
        return None
    rebuilt = [first + offset for first in firsts for offset in range(size)]
    return [first // size for first in firsts] if rebuilt == order else None


def _contiguous(length: int, sizes: Sequence[int]) -> Parts:
    parts, begin = [], 0
    for size in sizes:
        parts.append(tuple(range(begin, min(begin + size, length))))
        begin = min(begin + size, length)
    return tuple(parts)


def _listed(part: Sequence[int]) -> str:
    if list(part) == sorted(set(part)):
        return str(RankSet(part)) or "nothing"
    shown = ", ".join(map(str, part[:16]))
    return shown + (", …" if len(part) > 16 else "")


# Whether a split gives each token to one rank, and which ranks have parts that they should not.


def split_faults(by_rank: ByRank) -> Iterator[TokenFault]:
    """Yield tokens that came to no rank or to several."""
    shape = shape_fault(by_rank, "split")
    found = [shape] if shape is not None else list(foreign_values(by_rank, "split"))
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
        (FaultKind.DUPLICATED, twice, "came to several ranks, or several times to one rank"),
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
    return _other_parts(by_rank, layout.parts, layout.fitting) or (
        tuple(by_rank),
        "the rows are not split in the same way",
    )


def _other_parts(
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
    return _other_parts(by_rank, layout.parts, layout.fitting)


_Wrong = tuple[FaultKind, tuple[int, ...], str]


def gather_faults(by_rank: ByRank, split: Sequence[TokenFault]) -> Iterator[TokenFault]:
    """Yield what the faults of the split do not explain of the gathered sequence."""
    if not any(one.gathered_shape for one in by_rank.values()):
        return  # nothing gathers
    if any(fault.kind in (FaultKind.WRONG_DIM, FaultKind.MIXED) for fault in split):
        return
    shape = shape_fault(by_rank, "gather")
    found = [shape] if shape is not None else list(foreign_values(by_rank, "gather"))
    if found:
        is_known = any(fault.kind is FaultKind.FOREIGN for fault in split)
        yield from () if is_known else found
        return
    known = {token for fault in split for token in fault.tokens}
    ranks: dict[_Wrong, list[int]] = {}
    for rank, one in by_rank.items():
        for wrong in (*_wrong_counts(one, known), *_wrong_order(one, len(by_rank))):
            ranks.setdefault(wrong, []).append(rank)
    for (kind, tokens, said), those in ranks.items():
        moved = moved_ranks(by_rank) if kind is FaultKind.PERMUTED else None
        if moved is None:
            yield TokenFault(
                kind=kind, stage="gather", ranks=tuple(those), tokens=tokens, said=said
            )
            continue
        yield TokenFault(
            kind=FaultKind.OTHER_PART,
            stage="split",
            ranks=moved[0],
            tokens=tokens,
            said=f"{said}; {moved[1]}",
        )


def _wrong_counts(one: TokenTrace, known: Collection[int]) -> Iterator[_Wrong]:
    spec = one.spec
    lost, twice = counts_of(one.gathered, spec)
    for kind, tokens, what in (
        (FaultKind.LOST, lost, "went missing in the gathered sequence"),
        (FaultKind.DUPLICATED, twice, "came several times in the gathered sequence"),
    ):
        new = tuple(token for token in tokens if token not in known)
        if new:
            yield kind, new, f"{tokens_phrase(spec, new)} {what}"
    extra = len(one.gathered) // spec.batch - spec.length
    if extra > 0 and not lost and not twice:
        said = f"padding stays in each gathered row: {spec.length + extra} places for "
        yield FaultKind.PADDED, (), f"{said}{spec.length} tokens"


def _wrong_order(one: TokenTrace, num_ranks: int) -> Iterator[_Wrong]:
    spec = one.spec
    orders = [list(dict.fromkeys(row)) for row in rows(one, "gather")]
    misplaced = [
        token for row, order in enumerate(orders) for token in order if token // spec.length != row
    ]
    if misplaced:
        tokens = tuple(sorted(set(misplaced)))
        said = f"{tokens_phrase(spec, tokens)} came in the row of a different sample"
        yield FaultKind.PERMUTED, tokens, said
        return
    wanted = [sorted(order) for order in orders]
    moved = [
        token
        for order, right in zip(orders, wanted, strict=True)
        for token, due in zip(order, right, strict=True)
        if token != due
    ]
    if not moved:
        return
    order, right = next(
        (order, right) for order, right in zip(orders, wanted, strict=True) if order != right
    )
    how = order_phrase([right.index(token) for token in order], num_ranks)
    tokens = tuple(sorted(moved))
    yield FaultKind.PERMUTED, tokens, f"{tokens_phrase(spec, tokens)} came {how}"
