"""Loads that come to nothing: read beside the model, or written over before training begins."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from distdiag.checkpoint_event import Waste
from distdiag.event import CallSite
from distdiag.probes.keepers import unwrapped
from distdiag.probes.model_loads import ModelLoads
from distdiag.probes.module_names import clean_name
from distdiag.probes.module_slots import Slot, slots_of
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensor_bytes import is_readable, sample
from distdiag.probes.tensor_content import Content, Pending, contents
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import address_of, local_part

_MOST_COMPARED: Final = 6
_MOST_BYTES: Final = 1 << 26
_LEAST_ELEMENTS: Final = 16
_MOST_VALUES: Final = 1024
_UNLIKE: Final = 0.6
"""The correlation of values below which they have nothing in common."""


@dataclass(slots=True)
class _Read:
    """A tensor that was read for a place in a model, and what the model held then."""

    name: str
    slot: Slot
    given: Pending
    held: Pending


@dataclass(slots=True)
class _Written:
    name: str
    slot: Slot
    values: torch.Tensor


@dataclass(slots=True)
class _Watched:
    module: weakref.ref[nn.Module]
    api: str
    waste: Waste
    tensors: Sequence[_Read | _Written]
    count: int
    site: CallSite


class WastedLoads:
    """What was loaded before training began, until it is seen whether the models hold it."""

    def __init__(self, loads: ModelLoads, roots: Callable[[], list[nn.Module]]) -> None:
        """Know of no load; `roots` are the models that there are."""
        self._loads = loads
        self._roots = roots
        self._watched: list[_Watched] = []

    def wrote(self, module: nn.Module, site: CallSite) -> None:
        """Remember some of what a load has just put into a module."""
        found = [
            each
            for each in slots_of(module)
            if self._loads.wrote(each[1], self._loads.count - 1) and _has_values(each[2])
        ]
        tensors = [
            _Written(name, slot, values)
            for name, slot, tensor in _spread(found)
            if _varies(values := _values(tensor))
        ]
        self._watched = [each for each in self._watched if each.module() is not module]
        self._watch(module, "load_state_dict", Waste.OVERWRITTEN, tensors, site)

    def read(self, api: str, state_dict: Mapping[str, Any], site: CallSite) -> None:
        """Take note of tensors that were read into a state dict."""
        leaves = [(clean_name(name), each) for name, each in _tensors(state_dict, "", 6)]
        addresses = {address_of(local_part(tensor)) for _, tensor in leaves} - {None}
        for root in self._roots():
            places = {clean_name(n): (slot, t) for n, slot, t in slots_of(root)}
            inside = [s for s, t in places.values() if address_of(local_part(t)) in addresses]
            if inside:
                self._loads.mark(inside)  # it was read right into the model
                continue
            found = [(name, *places[name], t) for name, t in _placed(leaves, places)]
            tensors = [
                _Read(name, slot, _reading(_part_like(given, held)), _reading(held))
                for name, slot, held, given in _spread(found)
            ]
            self._watch(root, api, Waste.UNUSED, tensors, site)

    def _watch(
        self,
        module: nn.Module,
        api: str,
        waste: Waste,
        tensors: Sequence[_Read | _Written],
        site: CallSite,
    ) -> None:
        if len(tensors) > 1:
            reference = weakref.ref(module)
            self._watched.append(_Watched(reference, api, waste, tensors, self._loads.count, site))

    def settle(self, held: set[int]) -> Iterator[tuple[dict[str, Any], CallSite]]:
        """Yield what has come to nothing; `held` are the parameters of the optimizer, by id."""
        rest = []
        for each in self._watched:
            module = each.module()
            if module is None:
                continue
            if not any(id(parameter) in held for parameter in module.parameters()):
                rest.append(each)
            elif all(self._is_wasted(tensor, each.count) for tensor in each.tensors):
                fields = {
                    "api": each.api,
                    "waste": each.waste,
                    "target": type(unwrapped(module)).__name__,
                    "names": tuple(clean_name(tensor.name) for tensor in each.tensors),
                    "num_compared": len(each.tensors),
                }
                yield fields, each.site
        self._watched = rest

    def _is_wasted(self, tensor: _Read | _Written, count: int) -> bool:
        now = tensor.slot.tensor()
        if now is None or self._loads.wrote(tensor.slot, count):
            return False
        if isinstance(tensor, _Written):
            return _has_values(now) and _are_unlike(tensor.values, _values(now))
        current, given, held = (_taken(e) for e in (_reading(now), tensor.given, tensor.held))
        if current is None or given is None or held is None:
            return False
        return current.digest == held.digest and _differ(current, given)


def _placed(
    leaves: Sequence[tuple[str, torch.Tensor]], places: Mapping[str, tuple[Slot, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has the name, below some prefix, and the shape of a tensor of the model."""
    for path, tensor in leaves:
        parts = path.split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        name = next((name for name in names if name in places), None)
        if name is not None:
            wanted = places[name][1]
            if (wanted.shape, wanted.dtype) == (tensor.shape, tensor.dtype):
                yield name, tensor


def _tensors(value: object, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key), depth - 1)


def _spread(found: Sequence[Any]) -> list[Any]:
    """Choose a few, from the first one to the last one."""
    step = max(1, math.ceil(len(found) / _MOST_COMPARED))
    return list(found[::step])


def _part_like(given: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return of a whole tensor the part that this rank holds of a sharded one."""
    if is_dtensor(given) or not is_dtensor(held):
        return given
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = held
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    places = zip(offset, shape, strict=True)
    with out_of_sight():
        return given[tuple(slice(start, start + size) for start, size in places)]


def _reading(tensor: torch.Tensor) -> Pending:
    local = local_part(tensor)
    pending = contents([local] if local.nbytes <= _MOST_BYTES else [])
    pending.guard()
    return pending


def _taken(pending: Pending) -> Content | None:
    found = pending.take()
    return found[0] if found else None


def _differ(one: Content, other: Content) -> bool:
    return one.digest[0] == other.digest[0] and one.digest != other.digest


def _has_values(tensor: torch.Tensor) -> bool:
    """Say whether values can be read at once."""
    local = local_part(tensor)
    is_number = local.is_floating_point() and local.device.type == "cpu"
    return is_number and local.numel() >= _LEAST_ELEMENTS and is_readable(local)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with out_of_sight():
        return sample(local_part(tensor).detach())[:_MOST_VALUES].to(torch.float64, copy=True)


def _varies(values: torch.Tensor) -> bool:
    with out_of_sight():
        return bool(values.isfinite().all()) and float(values.std()) > 0


def _are_unlike(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or not _varies(after):
        return False
    with out_of_sight():
        one, other = before - before.mean(), after - after.mean()
        return abs(float(one.dot(other) / (one.norm() * other.norm()))) < _UNLIKE
