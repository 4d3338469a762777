"""The orders in which a sequence is dealt out to ranks, and how a wrong order reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from distdiag.ranks import RankSet

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
    return f"in another order: token {order[place]} is the first wrong one, at place {place}"


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
