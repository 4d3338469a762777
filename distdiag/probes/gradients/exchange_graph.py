"""Finds, in the graph of a loss, nodes that may send gradients to other ranks, and reads them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from distdiag.events.gradients import AutogradNode, Flow
from distdiag.probes.guard import guard
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

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


# Reads how large a gradient is before and after it was sent to other ranks.

Gradients = Sequence[torch.Tensor | None]


class _Amount(NamedTuple):
    num_elements: int
    total: torch.Tensor
    norm: torch.Tensor


class ExchangeReading:
    """The nodes of one backward pass, and what is found out while it runs.

    A hook that the program has put on the tensor that goes in or comes out runs between two nodes,
    so the gradient is read as the node before has left it and as the node after has got it.
    """

    def __init__(
        self, ways: Sequence[Way], recorder: Recorder, fail: Callable[[Exception], None]
    ) -> None:
        """Watch these nodes until `end`."""
        self._recorder = recorder
        self._fail = fail
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._amounts: dict[tuple[int, str], _Amount] = {}
        self._ways = list(ways)
        self._names = ["" if way.node is None else way.node.name() for way in ways]
        self._handles: list[Any] = []
        for place, way in enumerate(ways):
            if way.node is not None:
                self._handles += self._watch(place, way)

    def _watch(self, place: int, way: Way) -> list[Any]:
        handles = [
            way.node.register_prehook(self._guarded(self._enter, place)),
            way.node.register_hook(self._guarded(self._leave, place)),
        ]
        if way.above is not None:
            node, index = way.above
            handles.append(node.register_hook(self._guarded(self._give, place, index)))
        if way.next is not None:
            node, index = way.next
            handles.append(node.register_prehook(self._guarded(self._get, place, index)))
        return handles

    def _guarded(self, method: Callable[..., None], *fixed: int) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            if not self._handles or torch.compiler.is_compiling():
                return
            with guard(self._fail):
                method(*fixed, *gradients)

        return hook

    def _enter(self, place: int, _: Gradients) -> None:
        self._first[place] = self._recorder.num_events

    def _leave(self, place: int, passed: Gradients, given: Gradients) -> None:
        first, last = self._first.get(place, 0), self._recorder.num_events
        self._last[place] = last
        before, after = _tensors(given), _tensors(passed)
        is_plain = len(before) == len(after) == 1 and before[0].numel() == after[0].numel()
        if last > first or is_plain:
            self._note(place, "given", before)
            self._note(place, "passed", after)

    def _give(self, place: int, index: int, passed: Gradients, _: Gradients) -> None:
        self._note(place, "above", _tensors(passed[index : index + 1]))

    def _get(self, place: int, index: int, given: Gradients) -> None:
        self._note(place, "next", _tensors(given[index : index + 1]))

    def _note(self, place: int, side: str, tensors: list[torch.Tensor]) -> None:
        if not tensors or not all(map(is_readable, tensors)):
            return
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
        totals = [each.sum(dtype=torch.float64) for each in tensors]
        number = sum(each.numel() for each in tensors)
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        self._amounts[place, side] = _Amount(number, torch.stack(totals).sum(), norm)

    def end(self) -> None:
        """Leave the graph."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for way in self._ways:
            way.node = way.above = way.next = None

    def vectors(self) -> list[torch.Tensor]:
        """Return what is to be read, in an order of its own."""
        return [torch.stack(amount[1:]) for amount in self._amounts.values()]

    def nodes(
        self, values: Sequence[tuple[float, ...]], names: dict[int, str]
    ) -> tuple[AutogradNode, ...]:
        """Return what was found; `names` are those of the leaves, by their ids."""
        flows = {
            key: Flow(amount.num_elements, *value)
            for (key, amount), value in zip(self._amounts.items(), values, strict=True)
        }
        return tuple(
            AutogradNode(
                name=self._names[place],
                calls=(self._first.get(place, 0), self._last.get(place, 0)),
                given=_flow(flows, place, "above", "given"),
                passed=_flow(flows, place, "next", "passed"),
                parameters=tuple(
                    sorted(names[id(leaf)] for leaf in way.leaves if id(leaf) in names)
                ),
                below=tuple(way.below),
                is_bounded=way.is_bounded,
            )
            for place, way in enumerate(self._ways)
        )


def _tensors(gradients: Gradients) -> list[torch.Tensor]:
    return [each for each in gradients if isinstance(each, torch.Tensor)]


def _flow(flows: dict[tuple[int, str], Flow], place: int, beside: str, own: str) -> Flow:
    """Return what the neighbour knows, if it is of the same size, since hooks are in between."""
    mine = flows.get((place, own), Flow(0, math.nan, math.nan))
    other = flows.get((place, beside), mine)
    return other if other.num_elements == mine.num_elements else mine
