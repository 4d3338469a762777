"""How many tokens an expert takes at most, read from the calls of a layer that routes.

Two forms tell it: positions within experts (a running sum of who chose what) that are compared with
a number or spread over so many places, and a buffer of experts times places times channels. Only
shapes and numbers of the host are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from distdiag.probes.guard import guard
from distdiag.probes.routing_mode import Chosen
from distdiag.probes.routing_pass import Pass

_COMPARISONS: Final = frozenset(
    name for plain in ("lt", "le", "gt", "ge") for name in (plain, f"{plain}_", f"__{plain}__")
) | frozenset({"less", "less_equal", "greater", "greater_equal"})
_BUFFERS: Final = frozenset(
    {"zeros", "empty", "full", "new_zeros", "new_empty", "new_full", "view", "reshape"}
)
_BUFFER_DIMS: Final = 3
_MOST_MARKED: Final = 64


class CapacityWatch:
    """Sees the calls within the passes that a thread is in the middle of."""

    def __init__(self, passes: list[Pass], fail: Callable[[Exception], None]) -> None:
        """Note what is found in these passes; tell `fail` what goes wrong."""
        self._passes = passes
        self._fail = fail
        self._positions: dict[int, weakref.ref[torch.Tensor]] = {}

    def see(self, name: str, args: Sequence[Any], result: object, chosen: Chosen | None) -> None:
        """Look at a call by the name of its function; `chosen` if it chose experts."""
        with guard(self._fail):
            if chosen is not None:
                self._choose(chosen)
            elif self._passes and self._passes[-1].num_tokens:
                self._look(name, args, result)

    def _choose(self, chosen: Chosen) -> None:
        num_tokens, num_experts = chosen.scores.shape
        counts = frozenset().union(*(each.layer.counts for each in self._passes))
        if num_experts not in counts:
            if num_tokens in counts:  # experts choose tokens
                self._set(chosen.indices.shape[1])
            elif counts or not chosen.is_sure:
                return
        for each in self._passes:
            each.num_tokens, each.num_experts = num_tokens, num_experts
            each.k = chosen.indices.shape[1]

    def _look(self, name: str, args: Sequence[Any], result: object) -> None:
        if not isinstance(result, torch.Tensor):
            return
        if name in _BUFFERS and result.ndim == _BUFFER_DIMS:
            self._see_buffer(result)
        elif name == "cumsum":
            self._mark(result)
        elif self._positions and any(map(self._is_position, args[:2])):
            if name in _COMPARISONS and len(args) > 1:
                self._see_limit(args[0], args[1])
            elif name == "one_hot":
                self._set(result.shape[-1])
            elif result.dtype is not torch.bool:
                self._mark(result)

    def _mark(self, tensor: torch.Tensor) -> None:
        if len(self._positions) >= _MOST_MARKED:
            self._positions = {n: kept for n, kept in self._positions.items() if kept() is not None}
        if len(self._positions) < _MOST_MARKED:
            self._positions[id(tensor)] = weakref.ref(tensor)

    def _is_position(self, value: object) -> bool:
        kept = self._positions.get(id(value))
        return kept is not None and kept() is value

    def _see_limit(self, positions: object, limit: object) -> None:
        at = self._passes[-1]
        sizes = {at.num_tokens, at.num_tokens * at.k, at.num_tokens * at.num_experts}
        if not isinstance(positions, torch.Tensor) or positions.numel() not in sizes:
            return
        if isinstance(limit, torch.Tensor):
            if limit.ndim or limit.device.type != "cpu":
                return
            limit = limit.item()
        if isinstance(limit, (int, float)) and not isinstance(limit, bool):
            self._set(int(limit))

    def _see_buffer(self, buffer: torch.Tensor) -> None:
        at = self._passes[-1]
        channels = at.given.shape[-1] if at.given is not None else 0
        if any(
            each.given is not None and each.given.shape == buffer.shape for each in self._passes
        ):
            return  # a batch of as many sequences as there are experts
        if buffer.shape[0] == at.num_experts and buffer.shape[2] == channels:
            self._set(buffer.shape[1])

    def _set(self, capacity: int) -> None:
        for each in self._passes:
            if not each.capacity or each is self._passes[-1]:
                each.capacity = max(capacity, 0)
