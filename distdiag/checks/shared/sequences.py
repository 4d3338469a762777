"""Which ranks share sequences, and how to say so."""

from collections.abc import Iterator
from typing import Final

from distdiag.events.sequences import UseKind
from distdiag.views.sequences import Feeds, SequenceView, Uses

_PHRASES: Final[dict[UseKind, str]] = {
    "all_to_all": "all-to-all",
    "ring": "passing keys and values round a ring",
    "all_gather": "gathering keys and values",
}


def phrase_of(how: UseKind) -> str:
    """Name a way of sharing."""
    return _PHRASES[how]


def members_of(view: SequenceView) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that share sequences: those of the group, or each closed ring among them."""
    if view.how != "ring":
        yield tuple(view.ranks)
        return
    left = list(view.ranks)
    while left:
        ring = _ring(view.passes[-1], left[0])
        left = [rank for rank in left[1:] if rank not in ring]
        if len(ring) > 1:
            yield ring


def _ring(by_rank: Uses, first: int) -> tuple[int, ...]:
    """Follow the messages from rank to rank; nothing if they do not come back."""
    ring = [first]
    while len(ring) <= len(by_rank):
        event = by_rank.get(ring[-1])
        peer = event.uses[0].peer if event is not None and event.uses else -1
        if peer == first:
            return tuple(sorted(ring))
        if peer in ring or peer < 0:
            break
        ring.append(peer)
    return ()


def num_local_tokens(view: SequenceView, rank: int, num_ranks: int) -> int:
    """Return how many tokens a rank holds, -1 if that is not known."""
    counts = {use.num_tokens for each in view.passes for use in each[rank].uses}
    if len(counts) != 1:
        return -1
    count = counts.pop()
    return count // num_ranks if view.how == "all_to_all" and count > 0 else count


def are_mixed(by_rank: Feeds, members: tuple[int, ...]) -> bool:
    """Say whether no two ranks draw the same samples, by their indices and their contents."""
    feeds = [by_rank[rank] for rank in members]
    if any(not fed.batch or not fed.samples or "" in fed.samples for fed in feeds):
        return False
    if any(fed.num_batch not in fed.batch_sizes for fed in feeds):
        return False
    indices = {fed.batch for fed in feeds}
    contents = {fed.samples for fed in feeds}
    return len(indices) == len(contents) == len(feeds)


def is_one_text(view: SequenceView, members: tuple[int, ...]) -> bool:
    """Say whether ranks have parts of one text, and no texts of their own that see one another."""
    if view.how != "all_gather" or view.is_fed_by_others:
        return True
    return bool(view.feeds) and all(_are_same(each, members) for each in view.feeds)


def _are_same(by_rank: Feeds, members: tuple[int, ...]) -> bool:
    drawn = {(by_rank[rank].batch, by_rank[rank].samples) for rank in members}
    return len(drawn) == 1 and all(drawn.pop())
