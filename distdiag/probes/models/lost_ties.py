"""Parameters that were one under two names until a call gave each name a tensor of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import nn

from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import clean_name, own_parameters
from distdiag.probes.models.wrappers import Tree, sharded_parameters
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped

_CALLS: Final = ("to_empty", "load_state_dict", "to")
"""What may replace parameters: from meta, by what is assigned, or to meta."""

_DEVICES: Final = (str, torch.device)

_Slot = tuple[nn.Module, str]


class _Lost(NamedTuple):
    first: weakref.ref[nn.Module]
    name: str
    call: str


class Untied(NamedTuple):
    """The first name of what a parameter was one with, and the call since which it is not.

    Without a call the configuration of the model says so.
    """

    name: str
    call: str = ""


class LostTies:
    """Compares what is one parameter before and after the calls that may part it."""

    def __init__(self) -> None:
        self._lost: WeakMap[nn.Module, dict[str, _Lost]] = WeakMap()
        self._open: WeakMap[nn.Module, list[list[_Slot]]] = WeakMap()

    def watch(self, patches: Patches, fail: Callable[[Exception], None]) -> None:
        """Look at each of these calls from now on; `fail` gets what goes wrong here."""
        for call in _CALLS:
            patches.wrap(nn.Module, call, self._around(call, fail))

    def _around(
        self, call: str, fail: Callable[[Exception], None]
    ) -> Callable[[AnyCallable], AnyCallable]:
        def make(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def method(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
                if torch.compiler.is_compiling() or not _may_part(call, args, kwargs):
                    return original(self_, *args, **kwargs)
                ties: list[list[_Slot]] = []
                with guard(fail):
                    ties = list(_ties_in(self_))
                result = original(self_, *args, **kwargs)
                if ties:
                    with guard(fail):
                        self._compare(ties, call)
                return result

            return method

        return make

    def begin(self, module: nn.Module) -> None:
        """Take note of the ties in a module that a function is about to change."""
        self._open[module] = list(_ties_in(module))

    def end(self, module: nn.Module, call: str) -> None:
        """Compare them with what this function has left, if it was taken note of."""
        self._compare(self._open.pop(module, []), call)

    def _compare(self, ties: list[list[_Slot]], call: str) -> None:
        for (first, first_name), *others in ties:
            held = own_parameters(first).get(first_name)
            for module, name in others:
                now = own_parameters(module).get(name)
                if now is not held:
                    lost = _Lost(weakref.ref(first), first_name, call)
                    self._lost.setdefault(module, {})[name] = lost

    def pairs(self, tree: Tree) -> Iterator[tuple[tuple[int, str], Untied]]:
        """Yield what is still parted in a model and trained, by module and name."""
        paths = {id(module): path for path, module, _ in tree}
        records = sharded_parameters(tree)

        def held(module: nn.Module, name: str) -> torch.Tensor | None:
            record = records.get((id(module), name))
            return own_parameters(module).get(name) if record is None else record.sharded_param

        for _, module, _ in tree:
            for name, lost in (self._lost.get(module) or {}).items():
                first = lost.first()
                if first is None or id(first) not in paths:
                    continue
                now, then = held(module, name), held(first, lost.name)
                if now is not None and then is not None and _are_apart(now, then):
                    path = paths[id(first)]
                    full = clean_name(f"{path}.{lost.name}" if path else lost.name)
                    yield (id(module), name), Untied(full, lost.call)


def _may_part(call: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    if call == "to_empty":
        return True
    if call == "load_state_dict":
        return bool(kwargs.get("assign") or args[2:3] == (True,))
    # It may be a tensor, too, whose text would have to be read from its device.
    devices = [each for each in (*args[:1], kwargs.get("device")) if isinstance(each, _DEVICES)]
    return any("meta" in str(each) for each in devices)


def _ties_in(root: nn.Module) -> Iterator[list[_Slot]]:
    slots: dict[int, list[_Slot]] = {}
    for module in root.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((module, name))
    yield from (each for each in slots.values() if len(each) > 1)


def _are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_trained = one.requires_grad and other.requires_grad
    return one is not other and is_trained and one.shape == other.shape
