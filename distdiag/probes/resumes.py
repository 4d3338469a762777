"""Which parts of a checkpoint reached the optimizers before they stepped for the first time."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from distdiag.probes.by_identity import WeakMap, WeakMembers
from distdiag.probes.model_loads import ModelLoads
from distdiag.probes.module_slots import slots_of
from distdiag.probes.optimizer_state import parameters_of
from distdiag.probes.tensor_plans import address_of

_MOST_FILES: Final = 8
_MOST_TENSORS: Final = 10_000
_DEEPEST: Final = 4


class _File(NamedTuple):
    addresses: frozenset[int]
    num_states: int


@dataclass(slots=True)
class _Given:
    """A state that was given to an optimizer, which need not live any more."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    kind: type
    shapes: list[tuple[int, ...]]
    num_states: int
    has_stepped: bool = False


class Resumes:
    """What was loaded into optimizers and schedulers, and what the files with weights held."""

    def __init__(self, loads: ModelLoads, roots: Callable[[], list[nn.Module]]) -> None:
        """Know of nothing that was loaded."""
        self._loads = loads
        self._roots = roots
        self._files: deque[_File] = deque(maxlen=_MOST_FILES)
        self._offered = -1
        self._restored: WeakMembers[torch.optim.Optimizer] = WeakMembers()
        self._given: list[_Given] = []
        self._schedules: WeakMap[torch.optim.Optimizer, int]
        self._schedules = WeakMap()
        self._stepped: WeakMembers[torch.optim.Optimizer] = WeakMembers()
        self._seen: WeakMap[torch.optim.Optimizer, dict[str, Any]]
        self._seen = WeakMap()

    def read_file(self, found: object) -> None:
        """Take note of what `torch.load` has returned."""
        states = max(_num_states(found, _DEEPEST), default=0)
        addresses = (address_of(tensor) for tensor in _tensors(found, _DEEPEST))
        few = [address for _, address in zip(range(_MOST_TENSORS), addresses, strict=False)]
        self._files.append(_File(frozenset(few) - {None}, states))  # type: ignore[arg-type]

    def gave_weights(self, given: Mapping[str, Any]) -> None:
        """Take note of the tensors that were given to a model."""
        tensors = (each for each in given.values() if isinstance(each, torch.Tensor))
        addresses = {address_of(tensor) for tensor in tensors}
        for file in self._files:
            if not addresses.isdisjoint(file.addresses):
                self._offered = max(self._offered, file.num_states)

    def gave_state(self, optimizer: torch.optim.Optimizer, state_dict: object) -> None:
        """Take note of the state that was given to an optimizer."""
        state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if isinstance(state, Mapping) and state:
            self._restored.add(optimizer)
            of = weakref.ref(optimizer)
            self._given.append(_Given(of, type(optimizer), _shapes(optimizer), len(state)))

    def gave_schedule(self, scheduler: object) -> None:
        """Take note of a scheduler that continues where it stood."""
        optimizer = getattr(scheduler, "optimizer", None)
        step = getattr(scheduler, "last_epoch", -1)
        if isinstance(optimizer, torch.optim.Optimizer) and isinstance(step, int):
            self._schedules[optimizer] = step

    def before_step(self, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
        """Look at an optimizer that has not stepped before."""
        if optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        for each in self._given:
            each.has_stepped = each.has_stepped or each.optimizer() is optimizer
        if not is_first or not (self._loads.count or self._given or self._schedules):
            return
        held = {id(each) for each in parameters_of(optimizer)}
        stateful = {id(key) for key in optimizer.state if isinstance(key, torch.Tensor)}
        slots = (each for root in self._roots() for each in slots_of(root))
        loaded = {id(tensor) for _, slot, tensor in slots if self._loads.wrote(slot)}
        self._seen[optimizer] = {
            "optimizer": type(optimizer).__name__,
            "num_parameters": len(held),
            "num_loaded": len(held & loaded),
            "num_stateless": len(held - stateful),
            "was_restored": optimizer in self._restored,
            "num_lost": self._num_lost(optimizer),
            "offered": self._offered,
            "schedule_step": self._schedules.get(optimizer, -1),
        }

    def after_step(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what was seen, if this is an optimizer that keeps a state at all."""
        fields = self._seen.pop(optimizer, {})
        return fields if optimizer.state else {}

    def _num_lost(self, optimizer: torch.optim.Optimizer) -> int:
        shapes = _shapes(optimizer)
        others = [
            each.num_states
            for each in self._given
            if (each.kind, each.shapes) == (type(optimizer), shapes) and self._is_idle(each)
        ]
        return max(others, default=0)

    def _is_idle(self, given: _Given) -> bool:
        optimizer = given.optimizer()
        return not given.has_stepped and (optimizer is None or optimizer not in self._stepped)


def _shapes(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in parameters_of(optimizer)]


def _num_states(value: object, depth: int) -> Iterator[int]:
    if not isinstance(value, Mapping) or not depth:
        return
    state = value.get("state")
    if "param_groups" in value and isinstance(state, Mapping):
        yield len(state)
        return
    for item in value.values():
        yield from _num_states(item, depth - 1)
        if isinstance(item, list | tuple):
            yield from (n for each in item for n in _num_states(each, depth - 1))


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    items: Sequence[object] | Iterator[object] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        items = iter(value.values())
    elif depth and isinstance(value, list | tuple):
        items = value
    for item in items:
        yield from _tensors(item, depth - 1)
