"""Finds, in the graph of a loss, the nodes that may send gradients to other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from distdiag.probes.untyped import Untyped

_MOST_NODES: Final = 30_000
_MOST_BELOW: Final = 1_500
_MOST_SENDING: Final = 512


@dataclass(slots=True)
class Way:
    """A node whose backward function is not torch's own arithmetic, and what is around it.

    `above` is the node, with the place of its input, that alone gives it its gradient; `next` the
    node, with the place of its output, that gets one from it alone. `leaves` get their gradient
    through it and through no other such node after it.
    """

    node: Any
    above: tuple[Any, int] | None = None
    next: tuple[Any, int] | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    is_bounded: bool = True


def ways_from(roots: Sequence[Any]) -> list[Way]:
    """Return the roots as one, and then all such nodes, the nearest first.

    None if there are too many.
    """
    above: dict[Any, list[tuple[Any, int]]] = {root: [] for root in roots}
    waiting = list(above)
    for node in waiting:  # it grows meanwhile
        if len(waiting) > _MOST_NODES:
            return []
        for place, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            if child not in above:
                above[child] = []
                waiting.append(child)
            above[child].append((node, place))
    nodes = [node for node in waiting if _may_send(node)]
    if len(nodes) > _MOST_SENDING:
        return []
    places = {node: place for place, node in enumerate(nodes, 1)}
    first = Way(None)
    _descend(first, list(roots), places, _MOST_NODES)
    return [first, *(_way(node, above, places) for node in nodes)]


def _may_send(node: Untyped) -> bool:
    is_python = isinstance(node, torch._C._FunctionBase)
    return is_python or "alltoall" in node.name().lower().replace("_", "")


def _way(node: Untyped, above: dict[Any, list[tuple[Any, int]]], places: dict[Any, int]) -> Way:
    way = Way(node)
    if len(above[node]) == 1:
        way.above = above[node][0]
    children = [each for each in node.next_functions if each[0] is not None]
    if len(children) == 1 and len(above[children[0][0]]) == 1:
        way.next = children[0]
    _descend(way, [child for child, _ in children], places, _MOST_BELOW)
    return way


def _descend(way: Way, first: list[Any], places: dict[Any, int], most: int) -> None:
    seen = set(first)
    waiting = list(seen)
    for node in waiting:  # it grows meanwhile
        if len(waiting) > most:
            way.leaves, way.below, way.is_bounded = [], [], False
            return
        if node in places:
            way.below.append(places[node])
        elif hasattr(node, "variable"):
            way.leaves.append(node.variable)
        else:
            fresh = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= fresh
            waiting += fresh
