"""What the graph of a loss holds: its addends, a policy's ratio, logits and clamps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from distdiag.probes.losses.graph import MASKS
from distdiag.probes.losses.terms import SAME, Scalar, kind_of, number, saved
from distdiag.probes.untyped import Untyped

MOST_TERMS: Final = 16
MOST_CLAMPS: Final = 8
_MOST_STEPS: Final = 24
"""So far a term is followed down to where its gradient is wide."""
_MOST_SAMPLED: Final = 1 << 18
"""So many log-probabilities are read at most: a few rows of a large vocabulary."""
_MOST_ROWS: Final = 256
_MOST_TARGETS: Final = 32

_SUMS: Final = frozenset({"Sum", "Mean"})
_LOSSES: Final = frozenset({"NllLoss", "NllLoss2D"})
_CLAMPS: Final = frozenset({"Clamp", "ClampMin", "ClampMax"})
_PASSED: Final = frozenset({*SAME, *_SUMS, *MASKS, *_LOSSES, "Neg", "Mul", "Div"})


@dataclass(slots=True)
class Addend:
    """A term of a loss; the gradient that reaches output `index` of `node` is what it trains by."""

    node: Any
    index: int
    operations: list[str]
    factors: list[Scalar]
    masks: list[Scalar] = field(default_factory=list)


def addends_of(root: object) -> list[Addend]:
    """Return the terms that are added up to a loss of one element, each down to where it is wide.

    None of more than `MOST_TERMS` terms.
    """
    found: list[Addend] = []
    waiting = [Addend(root, 0, [], [])]
    while waiting and len(found) + len(waiting) <= MOST_TERMS:
        term = waiting.pop()
        below = _below(term)
        kind, _ = kind_of(term.node)
        if kind in ("Add", "Sub") and below:
            waiting += [
                Addend(child, index, [*term.operations], [*term.factors]) for child, index in below
            ]
        elif not _step_down(term, kind, below, is_scalar=True):
            _follow(term)
            found.append(term)
        else:
            waiting.append(term)
    return [] if waiting else found[::-1]


def _below(term: Addend) -> list[tuple[Any, int]]:
    nodes = term.node.next_functions
    if len(nodes) > 1 and term.index < len(nodes) and kind_of(term.node)[0] in SAME:
        nodes = nodes[term.index : term.index + 1]  # each output of a wrapper has its own input
    return [(child, index) for child, index in nodes if child is not None]


def _follow(term: Addend) -> None:
    """Go down from where a term begins to where its gradient is wide."""
    for _ in range(_MOST_STEPS):
        kind, _overload = kind_of(term.node)
        term.operations.append(kind)
        if not _step_down(term, kind, _below(term), is_scalar=False):
            return


def _step_down(
    term: Addend, kind: str, below: Sequence[tuple[Any, int]], *, is_scalar: bool
) -> bool:
    """Go to what lies below a node that has one input; say whether it was one to pass."""
    if kind not in _PASSED or len(below) != 1:
        return False
    if is_scalar and kind in (_SUMS | MASKS | _LOSSES):
        return False  # here the term begins
    if kind in ("Mul", "Div"):
        is_first = term.node.next_functions[0][0] is not None
        if kind == "Div" and not is_first:
            return False
        other = saved(term.node, "other" if is_first else "self")
        if other is None:
            return not is_scalar
        if other.numel() == 1:
            value = number(other.reshape(()))
            term.factors.append(_reciprocal(value) if kind == "Div" else value)
        elif kind == "Mul":
            term.masks.append(number(other.count_nonzero() / other.numel()))
    elif kind == "MaskedFill" and not is_scalar:
        mask = saved(term.node, "mask")
        if mask is not None and mask.dtype is torch.bool and mask.numel():
            term.masks.append(number((~mask).count_nonzero() / mask.numel()))
    term.node, term.index = below[0]
    return True


def _reciprocal(value: Scalar) -> Scalar:
    if isinstance(value, torch.Tensor):
        return value.reciprocal()  # whether it is zero is not known yet
    return 1 / value if value else math.inf


@dataclass(slots=True)
class Landmarks:
    """Nodes of a graph that tell something: the nearest to its root."""

    ratio: Any = None
    logits: Any = None
    loss_of_logits: Any = None
    clamps: list[Any] = field(default_factory=list)


def landmarks_of(root: object, most_nodes: int) -> Landmarks:
    """Look at the nodes that are nearest to the root."""
    found, seen = Landmarks(), {id(root): root}
    waiting: deque[tuple[Any, Any]] = deque([(root, None)])
    while waiting:
        node, parent = waiting.popleft()
        kind, _ = kind_of(node)
        _note(found, node, kind, parent)
        own = parent if kind in SAME else node
        for child, _ in node.next_functions:
            if child is not None and id(child) not in seen and len(seen) < most_nodes:
                seen[id(child)] = child
                waiting.append((child, own))
    return found


def _note(found: Landmarks, node: Untyped, kind: str, parent: Untyped) -> None:
    if kind == "Exp" and found.ratio is None and _weighs(parent) and _is_difference(node):
        found.ratio = node
    elif kind == "LogSoftmax" and found.logits is None:
        found.logits = node
        if parent is not None and kind_of(parent)[0] in _LOSSES:
            found.loss_of_logits = parent
    elif kind in _CLAMPS and len(found.clamps) < MOST_CLAMPS:
        found.clamps.append(node)


def _weighs(node: Untyped) -> bool:
    """Say whether a node multiplies by a constant, or clips, as the loss of a policy does."""
    if node is None:
        return False
    kind, _ = kind_of(node)
    num_trained = sum(child is not None for child, _ in node.next_functions)
    return kind in _CLAMPS or (kind == "Mul" and num_trained == 1)


def _is_difference(node: Untyped) -> bool:
    """Say whether an exponential is of what is trained minus a tensor that is not."""
    for _ in range(4):
        nodes = node.next_functions
        if len(nodes) != (2 if kind_of(node)[0] == "Sub" else 1):
            return False
        if kind_of(node)[0] == "Sub":
            return nodes[0][0] is not None and nodes[1][0] is None
        node = nodes[0][0]
        if node is None or kind_of(node)[0] not in (*SAME, *_CLAMPS, "Sub"):
            return False
    return False


# What is read of these nodes: numbers, or where they will be found.


def read_ratio(node: object) -> list[Scalar]:
    """Return the mean difference from 1 of those ratios that are not 1, and how many there are."""
    ratio = saved(node, "result")
    if ratio is None or not ratio.numel():
        return []
    away = (ratio.detach().double() - 1.0).abs()
    total = away.sum() / away.count_nonzero().clamp(min=1)
    return [number(total), float(ratio.numel())]


def read_logits(marks: Landmarks) -> tuple[int, int, list[Scalar], torch.Tensor] | None:
    """Return the number of classes and of rows, three numbers of these rows, and some targets.

    The numbers are the mean entropy, the mean cross entropy with the targets, and the share of rows
    with the same most probable class as the first.
    """
    log_probs = saved(marks.logits, "result") if marks.logits is not None else None
    if log_probs is None or log_probs.dim() < 1 or not log_probs.numel():
        return None
    dim = int(marks.logits._saved_dim)
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    num_classes = log_probs.shape[-1]
    if dim not in (-1, log_probs.dim() - 1) or num_classes < 2:
        return None
    flat = log_probs.detach().reshape(-1, num_classes)
    target = _targets(marks.loss_of_logits, flat.shape[0])
    most = max(8, min(_MOST_ROWS, _MOST_SAMPLED // num_classes))
    stride = -(-flat.shape[0] // most)
    rows = flat[::stride].double()
    entropy = -(rows.exp() * rows).nan_to_num(0.0).sum(1).mean()
    top = rows.argmax(1)
    cross: Scalar = math.nan
    targets = rows.new_empty(0)
    if target is not None:
        own = target[::stride]
        valid = (own >= 0) & (own < num_classes)
        picked = rows.gather(1, own.clamp(0, num_classes - 1).unsqueeze(1)).squeeze(1)
        cross = number(-torch.where(valid, picked, 0.0).sum() / valid.sum())
        targets = torch.where(valid, own, -1)[:_MOST_TARGETS].double()
    share = (top == top[0]).double().mean()
    return num_classes, rows.shape[0], [number(entropy), cross, number(share)], targets


def _targets(node: object, num_rows: int) -> torch.Tensor | None:
    target = saved(node, "target") if node is not None else None
    if target is None or target.numel() != num_rows or target.is_floating_point():
        return None
    return target.reshape(-1)


def read_clamps(nodes: Sequence[Untyped]) -> Iterator[tuple[float, float, int, Scalar]]:
    """Yield the bounds of each clamp, how many elements it has, and the share that is outside."""
    for node in nodes:
        tensor = saved(node, "self")
        least, greatest = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
        bounds = [math.nan if each is None else each for each in (least, greatest)]
        if (
            tensor is None
            or not tensor.numel()
            or not all(isinstance(b, int | float) for b in bounds)
        ):
            continue
        values = tensor.detach()
        outside = (values < bounds[0]) | (values > bounds[1])
        yield float(bounds[0]), float(bounds[1]), tensor.numel(), number(outside.double().mean())
