"""Marks in a graph of autograd where the scores of a router are, and finds what is made of them.

A mark lies in the metadata of a node and goes with it: nothing is kept alive.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from distdiag.probes.losses.terms import SAME, Scalar, kind_of, number, saved
from distdiag.probes.untyped import Untyped

KEY: Final = "distdiag.scores"
MOST_NODES: Final = 200
_MOST_MARKED: Final = 16

_ABOVE_LOGITS: Final = SAME | frozenset(
    {
        "Add",
        "Clamp",
        "Div",
        "LogSoftmax",
        "MaskedFill",
        "Mul",
        "Relu",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "Sqrt",
        "Sub",
        "Tanh",
        "Where",
    }
)
_PRODUCTS: Final = frozenset({"Addmm", "Bmm", "Linear", "Mm", "Mv"})
_OTHER_PARTS: Final = frozenset(
    {
        "BinaryCrossEntropyWithLogits",
        "Convolution",
        "Embedding",
        "FusedRmsNorm",
        "NativeBatchNorm",
        "NativeLayerNorm",
        "NllLoss",
        "NllLoss2D",
    }
)


class Mark(NamedTuple):
    """Scores of a layer, with so many rows."""

    layer: str
    num_rows: int


@dataclass(slots=True)
class Origin:
    """Of which scores a node is made; `divisors` are what it was divided by on the way.

    `sizes` are the numbers of elements that means were taken over. Not `is_clear`: functions of the
    program, or collectives, lie between.
    """

    marks: dict[int, Mark] = field(default_factory=dict)
    divisors: list[Scalar] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    is_clear: bool = True


def mark_scores(node: Untyped, mark: Mark) -> list[Any]:
    """Mark scores and what they were made of, down to the product that made the logits.

    Return all that was marked: what a bias was added to may be used further on without it.
    """
    marked: list[Any] = []
    waiting, count = [node], 0
    while waiting and count < _MOST_MARKED:
        node = waiting.pop()
        if node is None or _is_leaf(node):
            continue
        kind, _ = kind_of(node)
        is_last = kind in _PRODUCTS
        if not is_last and kind not in _ABOVE_LOGITS and count:
            continue
        node.metadata[KEY] = mark
        marked.append(node)
        count += 1
        if not is_last and kind in _ABOVE_LOGITS:
            waiting += [child for child, _ in node.next_functions]
    return marked


def origin_of(node: object, index: int = 0) -> Origin | None:
    """Return the scores of which an output is made; None if parameters or other parts go in."""
    found, seen, waiting = Origin(), {id(node): node}, [(node, index)]
    while waiting:
        node, index = waiting.pop()
        mark = _mark_of(node)
        if mark is not None:
            found.marks[id(node)] = mark
            continue
        kind, overload = kind_of(node)
        if _is_leaf(node) or kind in _OTHER_PARTS or len(seen) > MOST_NODES:
            return None
        found.is_clear = found.is_clear and not _is_of_program(node)
        _note_division(node, kind, overload, found)
        for child, place in inputs_of(node, index):
            if id(child) not in seen:
                seen[id(child)] = child  # held: an id may be used again
                waiting.append((child, place))
    return found if found.marks else None


def inputs_of(node: Untyped, index: int) -> list[tuple[Any, int]]:
    """Return what one of the outputs of a node is made of.

    One of several outputs of a wrapper belongs to one of its inputs.
    """
    below = list(node.next_functions)
    if len(below) > 1 and index < len(below) and kind_of(node)[0] in SAME:
        below = [below[index]]
    return [(child, place) for child, place in below if child is not None]


def _mark_of(node: object) -> Mark | None:
    metadata = getattr(node, "metadata", None)
    return metadata.get(KEY) if isinstance(metadata, dict) else None


def _is_leaf(node: Untyped) -> bool:
    return str(node.name()).endswith("AccumulateGrad")


def _is_of_program(node: Untyped) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction) or "c10d" in node.name()


def _note_division(node: Untyped, kind: str, overload: str, found: Origin) -> None:
    if kind == "Mean":
        sizes = [int(size) for size in node._saved_self_sym_sizes]
        dims = range(len(sizes)) if overload == "0" else map(int, node._saved_dim)
        # A negative dimension comes as an unsigned number.
        places = [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims]
        found.sizes.append(math.prod(sizes[place] for place in places))
    elif kind == "Div":
        other = saved(node, "other")
        if other is not None and other.numel() == 1:
            found.divisors.append(number(other))
