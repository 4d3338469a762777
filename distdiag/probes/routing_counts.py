"""Counts of tokens for each expert that are summed up in a type which cannot hold large counts.

Counts are known by where they come from: `bincount`, `histc`, or the sum of a mask that `one_hot`
or the scattering of ones has made. What is held in few bits is remembered when it is added up or
all-reduced, and is read when the forward pass ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from distdiag.probes.guard import guard
from distdiag.probes.routing_mode import Chosen
from distdiag.probes.routing_pass import Pass

_SOURCES: Final = frozenset({"bincount", "histc", "one_hot", "ones", "ones_like", "new_ones"})
_SCATTERS: Final = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "index_add_"})
_SAME: Final = frozenset(
    (
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int"),
        *("clone", "detach", "contiguous", "view", "reshape", "flatten", "squeeze", "sum"),
        *("add", "__add__", "__radd__", "add_", "__iadd__", "copy_"),
    )
)
_ADDS: Final = frozenset(
    {"add", "__add__", "__radd__", "add_", "__iadd__", "scatter_add", "scatter_add_", "index_add_"}
)
_FEW_BITS: Final = (torch.bfloat16, torch.float16)
_MOST_MARKED: Final = 64

Held = tuple[str, torch.Tensor]


class CountWatch:
    """Sees the calls within the passes that a thread is in the middle of."""

    def __init__(self, passes: list[Pass], fail: Callable[[Exception], None]) -> None:
        """Note what is found in these passes; tell `fail` what goes wrong."""
        self._passes = passes
        self._fail = fail
        self._counts: dict[int, weakref.ref[torch.Tensor]] = {}
        self._held: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}

    def see(self, name: str, args: Sequence[Any], result: object, _: Chosen | None) -> None:
        """Look at a call by the name of its function."""
        with guard(self._fail):
            if isinstance(result, torch.Tensor) and self._passes and args:
                self._look(name, args, result)

    def reduced(self) -> None:
        """Remember the counts that an all-reduce may be about to sum up."""
        for kept in self._counts.values():
            counts = kept()
            if counts is not None and self._is_small(counts):
                self._held[id(counts)] = ("all-reduced", kept)

    def take(self) -> list[Held]:
        """Return what was added up or all-reduced, and how."""
        held, self._held = self._held, {}
        found = [(how, kept()) for how, kept in held.values()]
        return [(how, counts) for how, counts in found if counts is not None]

    def _look(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        if name in _SOURCES:
            self._mark(result)
        elif name in _SCATTERS:
            if any(map(self._is_one, args[3:])):
                self._mark(result)
                self._hold(name, result)
        elif self._counts and name in _SAME and any(map(self._is_marked, args[:2])):
            self._mark(result)
            has_two = len(args) > 1 and isinstance(args[1], torch.Tensor)
            if has_two:
                self._hold(name, result)

    def _hold(self, name: str, result: torch.Tensor) -> None:
        if name in _ADDS and self._is_small(result):
            self._held[id(result)] = ("added up", weakref.ref(result))

    def _mark(self, tensor: torch.Tensor) -> None:
        if len(self._counts) >= _MOST_MARKED:
            self._counts = {n: kept for n, kept in self._counts.items() if kept() is not None}
        if len(self._counts) < _MOST_MARKED:
            self._counts[id(tensor)] = weakref.ref(tensor)

    def _is_marked(self, value: object) -> bool:
        kept = self._counts.get(id(value))
        return kept is not None and kept() is value

    def _is_one(self, value: object) -> bool:
        return value == 1 if isinstance(value, (int, float)) else self._is_marked(value)

    def _is_small(self, counts: torch.Tensor) -> bool:
        experts = self._passes[-1].num_experts if self._passes else 0
        is_for_experts = counts.numel() == experts > 0 and counts.ndim == 1
        return is_for_experts and counts.dtype in _FEW_BITS and not counts.requires_grad
