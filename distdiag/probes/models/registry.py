"""Which models and optimizers there are, in the order in which they were made."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.models import ObjectKind
from distdiag.probes.base import AnyCallable, Patches, like
from distdiag.probes.creations import Creations
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import class_name, own_buffers, own_modules, own_parameters
from distdiag.probes.models.wrappers import unwrapped
from distdiag.probes.tensors.by_identity import WeakMap

# Short names of models: the class, with a number from the second one on.


def class_of(root: nn.Module) -> str:
    """Return the name of a model's own class, whatever wraps it."""
    return class_name(unwrapped(root))


class ModelNames:
    """Gives each model a name that it keeps."""

    def __init__(self, creations: Creations | None = None) -> None:
        """Have named none; `creations` tells where those were made that are named."""
        self._creations = creations
        self._names: WeakMap[nn.Module, str] = WeakMap()
        self._num_names: dict[str, int] = {}

    def name(self, root: nn.Module) -> str:
        """Return the name of a model."""
        name = self._names.get(root)
        if name is None:
            kind = class_of(root)
            number = self._num_names[kind] = self._num_names.get(kind, 0) + 1
            name = self._names[root] = kind if number == 1 else f"{kind}#{number}"
            if self._creations is not None:
                self._creations.tell(ObjectKind.MODEL, name, unwrapped(root), root)
        return name


# The registry of all models and optimizers.

_NUMBERS = itertools.count()
_NOTES: list[Callable[[object, FrameType], None]] = []
"""Who is notified of new objects, by a number that a traced function may hold."""


_FEWEST: Final = 1024
"""With fewer it is not worth looking which of them are gone."""


class ObjectRegistry:
    """The living objects of a class, the oldest first; ranks make them in the same order."""

    def __init__(
        self, kind: type, ways: tuple[str, ...], creations: Creations | None = None
    ) -> None:
        """Know of none yet.

        `ways` are the methods by one of which each of them comes to be: copies do not pass through
        the constructor. `creations` is notified of where that is.
        """
        self._creations = creations
        self._kind = kind
        self._ways = ways
        self._references: list[weakref.ref[Any]] = []
        self._enough = _FEWEST
        self._numbers: WeakMap[Any, int] = WeakMap()
        self.count = 0
        """How many were ever made."""
        self.newest = -1
        """The number of the last one."""

    def watch(self, patches: Patches, fail: Callable[[Exception], None]) -> None:
        """Take note of each one that is made from now on; `fail` gets what goes wrong here."""
        for way in self._ways:
            if way in vars(self._kind):
                patches.wrap(self._kind, way, lambda original: self._noting(original, fail))

    def _noting(self, original: AnyCallable, fail: Callable[[Exception], None]) -> AnyCallable:
        number = len(_NOTES)

        def note(new: object, frame: FrameType) -> None:
            with guard(fail):
                self._note(new)
                if self._creations is not None:
                    self._creations.note(new, frame)

        _NOTES.append(note)

        # Without the mark that others bear, and without the probe among what it closes over: Dynamo
        # traces constructors.
        @like(original)
        def method(self_: object, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(self_, *args, **kwargs)
            result = original(self_, *args, **kwargs)
            _NOTES[number](self_, sys._getframe(1))
            return result

        return method

    def _note(self, new: object) -> None:
        self._references.append(weakref.ref(new))
        if len(self._references) > self._enough:  # nobody may have asked for those that live
            self._enough = max(_FEWEST, 2 * len(self.alive()))
        self._numbers[new] = self.newest = next(_NUMBERS)
        self.count += 1

    def number(self, one: object) -> int:
        """Return a number that is larger for what was made later, of any class; -1 if unknown."""
        return self._numbers.get(one, -1)

    def alive(self) -> list[Any]:
        """Return those that still exist."""
        found = [reference() for reference in self._references]
        known = {id(each): each for each in found if each is not None}
        self._references = [weakref.ref(found) for found in known.values()]
        return list(known.values())


class LiveModels(ObjectRegistry):
    """The modules of a rank, and which of them are whole models."""

    def __init__(self, creations: Creations | None = None) -> None:
        """Know of none yet; `creations` is notified of each."""
        super().__init__(nn.Module, ("__init__", "__setstate__"), creations)

    def roots(self) -> list[nn.Module]:
        """Return the models that there are, the oldest first; none before ranks are connected."""
        return list(roots_of(self.alive())) if dist.is_initialized() else []


def roots_of(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that are no part of another one and hold tensors, the oldest first."""
    parts = {id(child) for module in modules for child in own_modules(module).values()}
    for module in modules:
        if id(module) not in parts and _holds_tensors(module):
            yield module


def _holds_tensors(module: nn.Module) -> bool:
    return any(own_parameters(part) or own_buffers(part) for part in module.modules())
