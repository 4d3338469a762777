"""The losses of a backward pass: how many elements each has, and which of them count."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped

Scalar = float | torch.Tensor
"""A number, or where it will be found: what a GPU has computed is not read at once."""

_NAME: Final = re.compile(r"_?(\w+?)Backward(\d*)$")
SAME: Final = frozenset(
    {
        "Alias",
        "Clone",
        "Contiguous",
        "DDPSink",
        "Permute",
        "Reshape",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "Unsqueeze",
        "UnsafeView",
        "View",
    }
)
_REDUCTIONS: Final = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class Step:
    """A factor as it stands in the graph."""

    op: str
    value: Scalar
    num_terms: int = 1
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Term:
    """A loss whose elements all have one weight: that of the gradient that reaches `node`.

    `valid` tells which elements may count where `node` gets a gradient for each. `divisor` is what
    the node itself divides by, and `num_outer` of the steps lie above it. `doubts` are numbers that
    must be true for all this to hold. `label_sum` is that of the labels that are not `ignored`.
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
    num_outer: int = 1 << 16
    doubts: tuple[Scalar, ...] = ()
    ignored: int = 0
    label_sum: Scalar = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """How the walk came to a node: the factors, and the sum or mean over elements above it."""

    steps: tuple[Step, ...] = ()
    total: Any = None
    mean_over: int = 0
    num_outer: int = 0
    sizes: tuple[int, ...] = ()
    num_counted: Scalar | None = None
    num_elements: int = 0
    doubts: tuple[Scalar, ...] = ()

    def times(self, op: str, value: Scalar, num_terms: int = 1, *, is_float: bool = False) -> Way:
        """Go on below a factor."""
        return replace(self, steps=(*self.steps, Step(op, value, num_terms, is_float)))

    def doubtful(self, *doubts: Scalar) -> Way:
        """Go on, if these numbers are true."""
        return replace(self, doubts=(*self.doubts, *doubts))


def saved(node: object, name: str) -> torch.Tensor | None:
    """Return a tensor that a node has saved, if it can be read.

    Hooks that would compute it anew are not woken.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    tensor = raw.data
    return tensor if type(tensor) is torch.Tensor and is_readable(tensor) else None


def number(tensor: torch.Tensor) -> Scalar:
    """Read a number where that needs no wait."""
    return float(tensor) if tensor.device.type == "cpu" else tensor.detach().double().clone()


def kind_of(node: Untyped) -> tuple[str, str]:
    """Return the name of the operation that a node differentiates, and its number."""
    match = _NAME.match(node.name())
    return (match[1], match[2]) if match else ("", "")


def nll(node: Untyped, way: Way) -> list[Term]:
    """Return a cross entropy."""
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
            "pixels" if target.ndim == 3 and target.shape[1] > 1 else "nll",
            reduction,
            target.numel(),
            counted,
            _num_rows(node, target),
            way.steps,
            valid if reduction == "none" else None,
            counted if reduction == "mean" else 1.0,
            doubts=(is_plain, *way.doubts),
            ignored=ignored,
            label_sum=number(torch.where(valid, target, 0).sum()),
        )
    ]


def _num_rows(node: Untyped, target: torch.Tensor) -> int:
    """Return the number of sequences, by the shape that the logits had before they were one row."""
    if target.dim() > 1:
        return int(target.shape[0])
    for _ in range(12):
        kind, _ = kind_of(node)
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        if kind in ("View", "UnsafeView", "ReshapeAlias") and len(sizes) >= 3:
            return math.prod(int(size) for size in sizes[:-2])
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1 or kind not in (*SAME, "NllLoss", "LogSoftmax"):
            return 0
        node = below[0]
    return 0


def dense(node: Untyped, way: Way) -> list[Term]:
    """Return a loss all of whose elements count."""
    reduction = _REDUCTIONS[int(node._saved_reduction)]
    if reduction == "none" or way.total is not None:
        return total_of(way)
    target = saved(node, "target")
    if target is None:
        return []
    count = target.numel()
    divisor = float(count) if reduction == "mean" else 1.0
    return [Term(node, "dense", reduction, count, float(count), 0, way.steps, None, divisor)]


def total_of(way: Way) -> list[Term]:
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
