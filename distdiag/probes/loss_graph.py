"""Finds the losses of a backward pass in its graph, and by what each of them is multiplied.

It goes from the root through what keeps one weight for all elements (sums, means, products with
numbers, masks, views) and stops at the loss functions and at whatever else it meets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

MOST_NODES: Final = 200
MOST_TERMS: Final = 64

Scalar = float | torch.Tensor
"""A number, or where it will be found: what a GPU has computed is not read at once."""

_NAME: Final = re.compile(r"_?(\w+?)Backward(\d*)$")
_SAME: Final = frozenset(
    """
    Alias Clone Contiguous DDPSink Permute Reshape ReshapeAlias Select Slice Split Squeeze T
    ToCopy Transpose Unsqueeze UnsafeView View
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
_LOSSES: Final = frozenset(
    """
    BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss KlDiv L1Loss MseLoss SmoothL1Loss
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
_MASKS: Final = frozenset({"Index", "MaskedFill", "MaskedSelect", "Where"})
_REDUCTIONS: Final = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class Step:
    """A factor as it stands in the graph."""

    op: str
    value: Scalar
    num_terms: int = 1


@dataclass(frozen=True, slots=True)
class Term:
    """A loss whose elements all have one weight: that of the gradient that reaches `node`.

    `valid` tells which elements may count where `node` gets a gradient for each. `divisor` is what
    the node itself divides by, and `num_outer` of the steps lie above it. `doubts` are numbers that
    must be true for all this to hold.
    """

    node: Any
    kind: str
    reduction: str
    num_elements: int
    num_counted: Scalar
    num_rows: int = 0
    steps: tuple[Step, ...] = ()
    valid: torch.Tensor | None = None
    divisor: Scalar = 1.0
    num_outer: int = MOST_NODES
    doubts: tuple[Scalar, ...] = ()


@dataclass(frozen=True, slots=True)
class _Way:
    """How the walk came to a node: the factors, and the sum or mean over elements above it."""

    steps: tuple[Step, ...] = ()
    total: Any = None
    mean_over: int = 0
    num_outer: int = 0
    sizes: tuple[int, ...] = ()
    num_counted: Scalar | None = None
    num_elements: int = 0
    doubts: tuple[Scalar, ...] = ()

    def times(self, op: str, value: Scalar, num_terms: int = 1) -> _Way:
        return replace(self, steps=(*self.steps, Step(op, value, num_terms)))

    def doubtful(self, *doubts: Scalar) -> _Way:
        return replace(self, doubts=(*self.doubts, *doubts))


def losses_of(root: Any) -> list[Term]:  # noqa: ANN401
    """Return the losses that a pass from this node differentiates; none if that is not clear."""
    found: list[Term] = []
    waiting: list[tuple[Any, int, _Way]] = [(root, 0, _Way())]
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


def saved(node: Any, name: str) -> torch.Tensor | None:  # noqa: ANN401
    """Return a tensor that a node has saved, without waking hooks that would compute it anew."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    tensor = raw.data
    return tensor if type(tensor) is torch.Tensor else None


def number(tensor: torch.Tensor) -> Scalar:
    """Read a number where that needs no wait."""
    return float(tensor) if tensor.device.type == "cpu" else tensor.detach().double().clone()


def _kind(node: Any) -> tuple[str, str]:  # noqa: ANN401
    match = _NAME.match(node.name())
    return (match[1], match[2]) if match else ("", "")


def _visit(
    node: Any,  # noqa: ANN401
    index: int,
    way: _Way,
    found: list[Term],
) -> list[tuple[Any, int, _Way]]:
    kind, overload = _kind(node)
    below = [(child, place) for child, place in node.next_functions if child is not None]
    if kind in ("NllLoss", "NllLoss2D"):
        found += _nll(node, way)
    elif kind in ("Neg", "Add", "Sub"):
        return [(child, place, way) for child, place in below]
    elif kind in ("Stack", "Cat"):
        apart = replace(way, total=None, sizes=())  # losses that were put together
        return [(child, place, apart) for child, place in below]
    elif kind in _SAME:
        # One of several outputs of a wrapper belongs to one of its inputs.
        several = len(below) > 1 and index < len(node.next_functions)
        below = [node.next_functions[index]] if several else below
        return [(child, place, way) for child, place in below if child is not None]
    elif kind in ("Sum", "Mean"):
        return _reduce(node, kind, overload, below, way, found)
    elif kind in ("Mul", "Div"):
        return _scale(node, kind, below, way, found)
    elif kind in _MASKS and way.total is not None:
        masked = _mask(node, kind, way)
        if masked is not None and len(below) == 1:
            return [(*below[0], masked)]
        found += _total(way.doubtful(0.0))
    elif kind in _LOSSES:
        found += _dense(node, way)
    else:
        found += _total(way)
    return []


def _reduce(
    node: Any,  # noqa: ANN401
    kind: str,
    overload: str,
    below: Sequence[tuple[Any, int]],
    way: _Way,
    found: list[Term],
) -> list[tuple[Any, int, _Way]]:
    sizes = tuple(int(size) for size in node._saved_self_sym_sizes)
    if len(below) != 1:
        return []
    if overload != "0":
        # Sums of rows that are themselves summed; a mean over a part is a loss of its own.
        if kind == "Sum" and way.total is not None and way.num_counted is None:
            return [(*below[0], replace(way, sizes=sizes))]
        found += _total(way)
        return []
    if way.total is not None:
        found += _total(way)
        return []
    number_of = math.prod(sizes)
    inner = replace(way, total=node, sizes=sizes, mean_over=number_of if kind == "Mean" else 1)
    if kind == "Mean":
        inner = inner.times("mean", float(number_of), number_of)
    return [(*below[0], replace(inner, num_outer=len(inner.steps)))]


def _scale(
    node: Any,  # noqa: ANN401
    kind: str,
    below: Sequence[tuple[Any, int]],
    way: _Way,
    found: list[Term],
) -> list[tuple[Any, int, _Way]]:
    if len(below) != 1:
        found += _total(way)  # a product of two things that are trained
        return []
    is_first = node.next_functions[0][0] is not None
    other = saved(node, "other" if is_first else "self")
    if other is None or (kind == "Div" and not is_first):
        return []
    # What has a dimension belongs to rows: to the only one, perhaps.
    if other.numel() == 1 and (way.total is None or other.dim() == 0):
        step = ("/" if kind == "Div" else "*", number(other), _num_terms(below[0][0]))
        return [(*below[0], way.times(*step))]
    if way.total is None:
        return []
    masked = _multiplied(other, way) if kind == "Mul" else None
    return [(*below[0], masked or way.doubtful(0.0))]


def _multiplied(mask: torch.Tensor, way: _Way) -> _Way | None:
    """Take a factor for a mask, if it has one number for each element."""
    if mask.numel() != math.prod(way.sizes):
        return None
    kept = mask != 0
    # How many elements two masks let through is not known by their counts.
    counted = number(kept.sum()) if way.num_counted is None else math.nan
    way = way.doubtful(number(((mask == 1) | ~kept).all()))
    return replace(way, num_counted=counted, num_elements=mask.numel())


def _mask(node: Any, kind: str, way: _Way) -> _Way | None:  # noqa: ANN401
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


def _num_terms(node: Any) -> int:  # noqa: ANN401
    """Count what was added up right below a node."""
    count, waiting = 0, [node]
    while waiting and count < MOST_TERMS:
        kind, _ = _kind(waiting[-1])
        node = waiting.pop()
        if kind in ("Add", "Sub"):
            waiting += [child for child, _ in node.next_functions if child is not None]
        else:
            count += 1
    return count


# The losses


def _nll(node: Any, way: _Way) -> list[Term]:  # noqa: ANN401
    target = saved(node, "target")
    reduction = _REDUCTIONS[int(node._saved_reduction)]
    if target is None:
        return []
    ignored = int(node._saved_ignore_index)
    ignored -= (1 << 64) if ignored >= 1 << 63 else 0
    valid = target != ignored
    counted = number(valid.sum())
    weight = getattr(node, "_raw_saved_weight", None)  # of each class
    is_plain = float(weight is None or (weight.unpack_hook is None and weight.data is None))
    return [
        Term(
            node,
            "nll",
            reduction,
            target.numel(),
            counted,
            _num_rows(node, target),
            way.steps,
            valid if reduction == "none" else None,
            counted if reduction == "mean" else 1.0,
            doubts=(is_plain, *way.doubts),
        )
    ]


def _num_rows(node: Any, target: torch.Tensor) -> int:  # noqa: ANN401
    """Return the number of sequences, by the shape that the logits had before they were one row."""
    if target.dim() > 1:
        return int(target.shape[0])
    for _ in range(12):
        kind, _ = _kind(node)
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        if kind in ("View", "UnsafeView", "ReshapeAlias") and len(sizes) >= 3:
            return math.prod(int(size) for size in sizes[:-2])
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1 or kind not in (*_SAME, "NllLoss", "LogSoftmax"):
            return 0
        node = below[0]
    return 0


def _dense(node: Any, way: _Way) -> list[Term]:  # noqa: ANN401
    reduction = _REDUCTIONS[int(node._saved_reduction)]
    if reduction == "none" or way.total is not None:
        return _total(way)
    target = saved(node, "target")
    if target is None:
        return []
    count = target.numel()
    divisor = float(count) if reduction == "mean" else 1.0
    return [Term(node, "dense", reduction, count, float(count), 0, way.steps, None, divisor)]


def _total(way: _Way) -> list[Term]:
    """Return the sum or mean over elements that was met, whatever their loss is."""
    if way.total is None:
        return []
    count = math.prod(way.sizes)
    is_masked = way.num_counted is not None
    return [
        Term(
            way.total,
            "masked" if is_masked else "dense",
            "mean" if way.mean_over > 1 else "sum",
            way.num_elements if is_masked else count,
            way.num_counted if way.num_counted is not None else float(count),
            way.sizes[0] if len(way.sizes) > 1 else 0,
            way.steps,
            None,
            float(max(way.mean_over, 1)),
            way.num_outer,
            way.doubts,
        )
    ]
