"""The forward passes that a thread is in the middle of, and the mode that sees their calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import own_buffers, own_parameters
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.routing.mode import Chosen, RoutingMode
from distdiag.probes.routing.reading import RoutingReading
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents

# Which of the tensors that a module keeps a forward pass has changed.

_MOST_ELEMENTS: Final = 4096
_MOST_TENSORS: Final = 16

Versions = dict[str, tuple[int, int]]


def versions_of(module: nn.Module) -> Versions:
    """Return which tensors the module itself keeps without a gradient, and in which version."""
    return {name: (id(tensor), tensor._version) for name, tensor in _kept(module)}


def changed_since(module: nn.Module, before: Versions) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that were there before and were written to or replaced."""
    return [
        (name, tensor)
        for name, tensor in _kept(module)
        if name in before and before[name] != (id(tensor), tensor._version)
    ]


def read(tensor: torch.Tensor) -> Pending:
    """Begin to read what one of them holds."""
    pending = contents([tensor.detach()])
    pending.guard()
    return pending


def _kept(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    number = 0
    for name, value in (*own_buffers(module).items(), *vars(module).items()):
        is_tensor = isinstance(value, torch.Tensor) and not value.is_inference()
        if is_tensor and not value.requires_grad and 0 < value.numel() <= _MOST_ELEMENTS:
            yield name, value
            number += 1
        if number == _MOST_TENSORS:
            return


# The forward passes of modules that route, while a thread is in the middle of them.


@dataclass(slots=True)
class Layer:
    """A module that may route.

    `is_named`: the user says that it does. `is_router`: its class is called so. `num_passes` were
    begun in this step, observed wholly or not.
    """

    model: str
    name: str
    members: tuple[int, ...]
    counts: frozenset[int]
    is_random: bool
    is_named: bool = False
    is_router: bool = False
    calls: dict[bool, int] = field(default_factory=dict)
    num_passes: int = 0


@dataclass(slots=True)
class Pass:
    """A forward pass of such a module that has begun.

    `num_tokens` (0: none yet), `num_experts` and `k` are those of the last choice within it;
    `capacity` is how many tokens an expert takes, 0 if it is not known. `readings` are those of
    choices in it, and in passes right within it.
    """

    layer: Layer
    given: torch.Tensor | None
    is_recompute: bool
    is_observed: bool
    is_random: bool
    call: int
    versions: Versions
    ordinal: int = 0
    number: int = 0
    num_tokens: int = 0
    num_experts: int = 0
    k: int = 0
    capacity: int = 0
    sites: dict[int, CallSite] = field(default_factory=dict)
    module: nn.Module | None = None
    readings: list[RoutingReading] = field(default_factory=list)


# Which tensors a router adds to the scores by which it chooses experts, and no gradient trains.

_ADDS: Final = frozenset(
    ("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__")
)


class Biases:
    """The biases that were seen, by module and name."""

    def __init__(self) -> None:
        self._names: WeakMap[nn.Module, set[str]] = WeakMap()

    def add(self, module: nn.Module, name: str) -> None:
        """Take note of one."""
        self._names.setdefault(module, set()).add(name)

    def has(self, module: nn.Module, name: str) -> bool:
        """Say whether it is one."""
        return name in self._names.get(module, ())


class BiasSearch:
    """Sees the calls within the passes that a thread is in the middle of.

    A bias has one number for each expert and is added to a row of scores for each token; that it is
    one is known when experts are chosen by as many scores later on.
    """

    def __init__(
        self, passes: list[Pass], biases: Biases, fail: Callable[[Exception], None]
    ) -> None:
        """Note the `biases` of the modules of these passes; tell `fail` what goes wrong."""
        self._passes = passes
        self._biases = biases
        self._fail = fail
        self._added: list[tuple[int, nn.Module, str]] = []

    def see(self, name: str, args: Sequence[Any], result: object, chosen: Chosen | None) -> None:
        """Look at a call by the name of its function; `chosen` if it chose experts."""
        with guard(self._fail):
            if chosen is not None:
                self._choose(chosen.scores.shape[1])
            elif name in _ADDS and isinstance(result, torch.Tensor) and len(args) > 1:
                self._add(args[:2], result)

    def _choose(self, num_experts: int) -> None:
        for size, module, name in self._added:
            if size == num_experts:
                self._biases.add(module, name)

    def _add(self, terms: Sequence[Any], result: torch.Tensor) -> None:
        size = result.shape[-1] if result.ndim > 1 else 0
        if not size or not result.is_floating_point() or result.numel() == size:
            return
        for term in terms:
            if isinstance(term, torch.Tensor) and term.numel() == size and not term.requires_grad:
                self._added.extend((size, *found) for found in self._kept(term))

    def _kept(self, term: torch.Tensor) -> Iterator[tuple[nn.Module, str]]:
        """Yield where the modules around keep a tensor, or what it is a view of."""
        place = address_of(term)
        for module in (opened.module for opened in self._passes if opened.module is not None):
            for name, kept in _untrained(module):
                is_same = kept is term or (place is not None and address_of(kept) == place)
                if is_same and kept.numel() == term.numel():
                    yield module, name


def _untrained(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*own_buffers(module).items(), *own_parameters(module).items()):
        if tensor is not None and not tensor.requires_grad:
            yield name, tensor


# Counts of tokens for each expert that are summed up in a type which cannot hold large counts.
#
# Counts are known by where they come from: `bincount`, `histc`, or the sum of a mask that `one_hot`
# or the scattering of ones has made. What is held in few bits is remembered when it is added up or
# all-reduced, and is read when the forward pass ends.

_SOURCES: Final = frozenset({"bincount", "histc", "one_hot", "ones", "ones_like", "new_ones"})
_SCATTERS: Final = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "index_add_"})
_SAME: Final = frozenset(
    (
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int"),
        *("clone", "detach", "contiguous", "view", "reshape", "flatten", "squeeze", "sum"),
        *("add", "__add__", "__radd__", "add_", "__iadd__", "copy_"),
    )
)
_ROUTING_COUNTS_ADDS: Final = frozenset(
    {"add", "__add__", "__radd__", "add_", "__iadd__", "scatter_add", "scatter_add_", "index_add_"}
)
_FEW_BITS: Final = (torch.bfloat16, torch.float16)
_MOST_MARKED: Final = 64

Held = tuple[str, torch.Tensor]


class CountSearch:
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
        if name in _ROUTING_COUNTS_ADDS and self._is_small(result):
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


# How many tokens an expert takes at most, read from the calls of a layer that routes.
#
# Two forms tell it: positions within experts (a running sum of who chose what) that are compared
# with a number or spread over so many places, and a buffer of experts times places times channels.
# Only shapes and numbers of the host are read.

_COMPARISONS: Final = frozenset(
    name for plain in ("lt", "le", "gt", "ge") for name in (plain, f"{plain}_", f"__{plain}__")
) | frozenset({"less", "less_equal", "greater", "greater_equal"})
_BUFFERS: Final = frozenset(
    {"zeros", "empty", "full", "new_zeros", "new_empty", "new_full", "view", "reshape"}
)
_BUFFER_DIMS: Final = 3


class CapacitySearch:
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


# All passes that a thread is in, and the mode that notifies them.

Tell = tuple[
    Callable[[Chosen], None],
    Callable[[], None],
    Callable[[object], None],
    Callable[[torch.Tensor], None],
]
"""Who is notified of choices, draws, writes and single numbers."""
Saw = Callable[[str, tuple[Any, ...], object], None]


class Passes(threading.local):
    """The passes of this thread, the outermost one first."""

    def __init__(self, biases: Biases) -> None:
        """Be in the middle of none; note the biases that are seen."""
        self._biases = biases
        self.open: list[Pass] = []
        self.mode: RoutingMode | None = None
        self.counts: CountSearch | None = None

    def innermost_routing(self) -> Pass | None:
        """Return the innermost pass in which experts were chosen already."""
        return next((each for each in reversed(self.open) if each.num_tokens), None)

    def innermost_of(self, layer: Layer) -> Pass | None:
        """Return the innermost pass if it is one of this layer."""
        return self.open[-1] if self.open and self.open[-1].layer is layer else None

    def enter(
        self,
        opened: Pass,
        tell: Tell,
        fail: Callable[[Exception], None],
        saw_call: Saw,
    ) -> None:
        """Begin a pass; the outermost one begins to see calls, and tells of them."""
        self.open.append(opened)
        if self.mode is not None:
            return
        sizes = CapacitySearch(self.open, fail)
        counts = self.counts = CountSearch(self.open, fail)
        biases = BiasSearch(self.open, self._biases, fail)

        def see(name: str, args: tuple[Any, ...], result: object, chosen: Chosen | None) -> None:
            sizes.see(name, args, result, chosen)
            counts.see(name, args, result, chosen)
            biases.see(name, args, result, chosen)
            saw_call(name, args, result)

        self.mode = RoutingMode(*tell, see, fail=fail)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, layer: Layer, settle: Callable[[], None]) -> None:
        """End the pass of a layer, and those within it that were not ended.

        The end of the outermost one is the time to `settle` what its calls have shown.
        """
        if not any(each.layer is layer for each in self.open):
            return
        while self.open and self.open.pop().layer is not layer:
            pass
        if not self.open and self.mode is not None:
            settle()
            mode, self.mode, self.counts = self.mode, None, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
