"""Finds the losses of a backward pass in its graph, and by what each of them is multiplied.

It goes from the root through what keeps one weight for all elements (sums, means, products with
numbers, masks, views) and stops at the loss functions and at whatever else it meets.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from distdiag.probes.losses.terms import (
    SAME,
    Term,
    Way,
    dense,
    kind_of,
    nll,
    number,
    saved,
    total_of,
)
from distdiag.probes.untyped import Untyped

MOST_NODES: Final = 200
MOST_TERMS: Final = 64

_LOSSES: Final = frozenset(
    {
        "BinaryCrossEntropy",
        "BinaryCrossEntropyWithLogits",
        "HuberLoss",
        "KlDiv",
        "L1Loss",
        "MseLoss",
        "SmoothL1Loss",
    }
)
MASKS: Final = frozenset({"Index", "MaskedFill", "MaskedSelect", "Where"})


def losses_of(root: object) -> list[Term]:
    """Return the losses that a pass from this node differentiates; none if that is not clear."""
    found: list[Term] = []
    waiting: list[tuple[Any, int, Way]] = [(root, 0, Way())]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node, index, way = waiting.pop()
        waiting += _visit(node, index, way, found)
    if waiting or len(found) > MOST_TERMS:
        return []
    # A sum over the sum of two things is met once for each of them.
    once = {id(term.node): term for term in reversed(found)}
    return [] if len({(id(t.node), t.kind) for t in found}) > len(once) else list(once.values())


def _visit(
    node: Untyped,
    index: int,
    way: Way,
    found: list[Term],
) -> list[tuple[Any, int, Way]]:
    kind, overload = kind_of(node)
    below = [(child, place) for child, place in node.next_functions if child is not None]
    if kind in ("NllLoss", "NllLoss2D"):
        found += nll(node, way)
    elif kind in ("Neg", "Add", "Sub"):
        return [(child, place, way) for child, place in below]
    elif kind in ("Stack", "Cat"):
        apart = replace(way, total=None, sizes=())  # losses that were put together
        return [(child, place, apart) for child, place in below]
    elif kind in SAME:
        # One of several outputs of a wrapper belongs to one of its inputs.
        several = len(below) > 1 and index < len(node.next_functions)
        below = [node.next_functions[index]] if several else below
        return [(child, place, way) for child, place in below if child is not None]
    elif kind in ("Sum", "Mean"):
        return _reduce(node, kind, overload, below, way, found)
    elif kind in ("Mul", "Div"):
        return _scale(node, kind, below, way, found)
    elif kind in MASKS and way.total is not None:
        masked = _mask(node, kind, way)
        if masked is not None and len(below) == 1:
            return [(*below[0], masked)]
        found += total_of(way.doubtful(0.0))
    elif kind in _LOSSES:
        found += dense(node, way)
    else:
        found += total_of(way)
    return []


def _reduce(
    node: Untyped,
    kind: str,
    overload: str,
    below: Sequence[tuple[Any, int]],
    way: Way,
    found: list[Term],
) -> list[tuple[Any, int, Way]]:
    sizes = tuple(int(size) for size in node._saved_self_sym_sizes)
    if len(below) != 1:
        return []
    if overload != "0":
        # Sums of rows that are themselves summed; a mean over a part is a loss of its own.
        if kind == "Sum" and way.total is not None and way.num_counted is None:
            return [(*below[0], replace(way, sizes=sizes))]
        found += total_of(way)
        return []
    if way.total is not None:
        found += total_of(way)
        return []
    number_of = math.prod(sizes)
    inner = replace(way, total=node, sizes=sizes, mean_over=number_of if kind == "Mean" else 1)
    if kind == "Mean":
        inner = inner.times("mean", float(number_of), number_of)
    return [(*below[0], replace(inner, num_outer=len(inner.steps)))]


def _scale(
    node: Untyped,
    kind: str,
    below: Sequence[tuple[Any, int]],
    way: Way,
    found: list[Term],
) -> list[tuple[Any, int, Way]]:
    if len(below) != 1:
        found += total_of(way)  # a product of two things that are trained
        return []
    is_first = node.next_functions[0][0] is not None
    other = saved(node, "other" if is_first else "self")
    if other is None or (kind == "Div" and not is_first):
        return []
    # What has a dimension belongs to rows: to the only one, perhaps.
    if other.numel() == 1 and (way.total is None or other.dim() == 0):
        step = ("/" if kind == "Div" else "*", number(other), _num_terms(below[0][0]))
        return [(*below[0], way.times(*step, is_float=other.is_floating_point()))]
    if way.total is None:
        return []
    masked = _multiplied(other, way) if kind == "Mul" else None
    return [(*below[0], masked or way.doubtful(0.0))]


def _multiplied(mask: torch.Tensor, way: Way) -> Way | None:
    """Take a factor for a mask, if it has one number for each element."""
    if mask.numel() != math.prod(way.sizes):
        return None
    kept = mask != 0
    # How many elements two masks let through is not known by their counts.
    counted = number(kept.sum()) if way.num_counted is None else math.nan
    way = way.doubtful(number(((mask == 1) | ~kept).all()))
    return replace(way, num_counted=counted, num_elements=mask.numel())


def _mask(node: Untyped, kind: str, way: Way) -> Way | None:
    if way.num_counted is not None:
        return None
    taken = math.prod(way.sizes)
    if kind == "Index":
        sizes = tuple(int(size) for size in node._saved_self_sym_sizes)
        return replace(way, sizes=sizes, num_counted=float(taken), num_elements=math.prod(sizes))
    name = "condition" if kind == "Where" else "mask"
    mask = saved(node, name)
    if mask is None or mask.dtype is not torch.bool:
        return None
    sizes = tuple(mask.shape)
    if kind == "MaskedSelect":
        return replace(way, sizes=sizes, num_counted=float(taken), num_elements=mask.numel())
    if mask.numel() != taken:
        return None
    is_kept = kind == "Where" and node.next_functions[0][0] is not None
    kept = mask if is_kept else ~mask
    return replace(way, num_counted=number(kept.sum()), num_elements=taken)


def _num_terms(node: Untyped) -> int:
    """Count what was added up right below a node."""
    count, waiting = 0, [node]
    while waiting and count < MOST_TERMS:
        kind, _ = kind_of(waiting[-1])
        node = waiting.pop()
        if kind in ("Add", "Sub"):
            waiting += [child for child, _ in node.next_functions if child is not None]
        else:
            count += 1
    return count
