"""What the ranks of one collective must agree on, and where their records contradict that."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from distdiag.events.collectives import Collective, Signature, Sizes
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import Alignment

ROOTED = frozenset({"broadcast", "reduce", "gather", "gather_into_tensor", "scatter"})
"""Collectives in which one rank, the root, does something else than the others."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_EQUAL = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "gather_into_tensor",
    "reduce_scatter_tensor",
)


class Aspect(StrEnum):
    """What ranks can disagree on, the more telling first."""

    OP = "op"
    ROOT = "root"
    SHAPE = "shape"
    DTYPE = "dtype"
    REDUCE_OP = "reduce_op"
    MODULE = "module"


_OF_MESSAGE: tuple[Aspect, ...] = (Aspect.SHAPE, Aspect.DTYPE)


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source` sends `sent` elements to `target`, which has room for `expected`."""

    source: int
    target: int
    sent: int
    expected: int


def contradiction(alignment: Alignment[Collective]) -> Aspect | None:
    """Return the most telling aspect on which the records contradict one another, if any does."""
    calls = alignment.by_rank
    if len(calls) < 2:
        return None
    aspects = _OF_MESSAGE if alignment.kind == "message" else tuple(Aspect)
    return next((aspect for aspect in aspects if _differs(aspect, calls)), None)


def clean_module(name: str | None) -> str | None:
    """Return a module's name without the parts that wrappers add to it."""
    parts = [part for part in (name or "").split(".") if part not in _WRAPPERS]
    return ".".join(parts) or name


def numels(sizes: Sizes) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(prod(size) for size in sizes)


def payload(signature: Signature) -> tuple[int, ...]:
    """Return the number of elements of each tensor that the call hands over."""
    return numels(signature.input_sizes or signature.output_sizes)


def wants_equal_sizes(op: str) -> bool:
    """Say whether every rank must hand over as many elements as every other."""
    return op in _EQUAL or op.endswith("_coalesced")


def uneven_transfers(calls: Mapping[int, Collective]) -> tuple[Transfer, ...]:
    """Return the pairs of ranks of one call where what is sent does not fit what is expected."""
    return tuple(t for t in _transfers(calls) if t.sent != t.expected)


def _differs(aspect: Aspect, calls: Mapping[int, Collective]) -> bool:
    signatures = [call.signature for call in calls.values()]
    op = signatures[0].op
    match aspect:
        case Aspect.OP:
            return len({s.op for s in signatures}) > 1
        case Aspect.ROOT:
            return op in ROOTED and _several({s.root for s in signatures})
        case Aspect.SHAPE:
            return _shapes_differ(calls)
        case Aspect.DTYPE:
            return _several({frozenset(s.dtypes) or None for s in signatures if op != "barrier"})
        case Aspect.REDUCE_OP:
            return "reduce" in op and _several({s.reduce_op for s in signatures})
        case Aspect.MODULE:
            is_sharding = op.startswith(("all_gather", "reduce_scatter"))
            return is_sharding and _several({clean_module(c.site.module) for c in calls.values()})


def _several(values: Set[object]) -> bool:
    """Say whether there are several values, none of them unknown."""
    return len(values) > 1 and None not in values


def _shapes_differ(calls: Mapping[int, Collective]) -> bool:
    signatures = [call.signature for call in calls.values()]
    if wants_equal_sizes(signatures[0].op):
        return len({payload(signature) for signature in signatures}) > 1
    return bool(uneven_transfers(calls))


def _transfers(calls: Mapping[int, Collective]) -> Iterator[Transfer]:
    any_call = next(iter(calls.values()))
    if any_call.signature.peer is not None:
        yield from _message(calls)
        return
    places = {rank: place for place, rank in enumerate(any_call.group.ranks)}
    root = any_call.signature.root
    op = any_call.signature.op
    for source in [root] if op == "scatter" else calls:
        for target in [root] if op == "gather" else calls:
            if source not in places or target not in places:
                continue
            if source not in calls or target not in calls:
                continue
            theirs = calls[target].signature
            sent = _sent(calls[source].signature, places[target], len(places))
            expected = _room(theirs, places[source], len(places))
            if sent is not None and expected is not None:
                yield Transfer(source, target, sent, expected)


def _message(calls: Mapping[int, Collective]) -> Iterator[Transfer]:
    sender = next((r for r, c in calls.items() if "recv" not in c.signature.op), None)
    receiver = next((r for r, c in calls.items() if "recv" in c.signature.op), None)
    if sender is None or receiver is None:
        return
    sent, expected = sum(payload(calls[sender].signature)), sum(payload(calls[receiver].signature))
    yield Transfer(sender, receiver, sent, expected)


def _sent(call: Signature, place: int, num_ranks: int) -> int | None:
    """Return how many elements the call sends to the rank at a place of the group."""
    match call.op:
        case "all_gather" | "gather":
            return sum(numels(call.input_sizes))
        case "scatter" | "reduce_scatter" | "all_to_all":
            return _entry(call.input_sizes, place, num_ranks)
        case "all_to_all_single":
            return _rows(call.input_sizes, call.input_splits, place, num_ranks)
        case _:
            return None


def _room(call: Signature, place: int, num_ranks: int) -> int | None:
    """Return how many elements the call expects from the rank at a place of the group."""
    match call.op:
        case "all_gather" | "all_to_all" | "gather":
            return _entry(call.output_sizes, place, num_ranks)
        case "scatter" | "reduce_scatter":
            return sum(numels(call.output_sizes)) if call.output_sizes else None
        case "all_to_all_single":
            return _rows(call.output_sizes, call.output_splits, place, num_ranks)
        case _:
            return None


def _entry(sizes: Sizes, place: int, num_ranks: int) -> int | None:
    return prod(sizes[place]) if len(sizes) == num_ranks else None


def _rows(sizes: Sizes, splits: tuple[int, ...], place: int, num_ranks: int) -> int | None:
    if len(sizes) != 1 or not sizes[0] or (splits and len(splits) != num_ranks):
        return None
    rows = splits[place] if splits else sizes[0][0] // num_ranks
    return rows * prod(sizes[0][1:])


def ranks_in(transfers: tuple[Transfer, ...]) -> RankSet:
    """Return the ranks that explain the transfers: the one in all of them, or else every one."""
    pairs = [{transfer.source, transfer.target} for transfer in transfers]
    shared = set.intersection(*pairs) if pairs else set()
    return RankSet(shared if len(shared) == 1 else set().union(*pairs))
