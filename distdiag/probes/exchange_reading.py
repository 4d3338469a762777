"""Reads how large a gradient is before and after it was sent to other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distdiag.gradient_event import Flow, Passage
from distdiag.probes.exchange_graph import Way
from distdiag.probes.guard import guard
from distdiag.probes.tensor_bytes import is_readable
from distdiag.recorder import Recorder

Gradients = Sequence[torch.Tensor | None]


class _Amount(NamedTuple):
    num_elements: int
    total: torch.Tensor
    norm: torch.Tensor


class ExchangeReading:
    """The passages of one backward pass, and what is found out while it runs.

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
        def hook(*gradients: Any) -> None:  # noqa: ANN401
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

    def scalars(self) -> list[torch.Tensor]:
        """Return what is to be read, in an order of its own."""
        return [each for amount in self._amounts.values() for each in amount[1:]]

    def passages(self, values: Sequence[float], names: dict[int, str]) -> tuple[Passage, ...]:
        """Return what was found; `names` are those of the leaves, by their ids."""
        left = iter(values)
        flows = {
            key: Flow(amount.num_elements, next(left), next(left))
            for key, amount in self._amounts.items()
        }
        return tuple(
            Passage(
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
