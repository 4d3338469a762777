"""What `to_empty` left in the tensors that it made: whoever still holds that was never written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import utils

from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import own_buffers, own_parameters
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.untyped import Untyped


class _Left(NamedTuple):
    """What was found in a tensor, as number `place`, and how often it had been written."""

    contents: Pending
    place: int
    versions: tuple[int, ...]


class EmptiedTensors:
    """Reads the fresh memory of tensors; it is never written to.

    Memory may hold by chance what is written next, the weights of a model that was there before:
    a tensor must not have been written in place since, either.
    """

    def __init__(self) -> None:
        self._left: WeakMap[torch.Tensor, _Left] = WeakMap()

    def watch(self, patches: Patches, fail: Callable[[Exception], None]) -> None:
        """Look after each call of `to_empty` from now on; `fail` gets what goes wrong here."""

        def make(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def to_empty(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
                result = original(self_, *args, **kwargs)
                if not torch.compiler.is_compiling():
                    with guard(fail):
                        self._read(list(_tensors_in(self_)))
                return result

            return to_empty

        patches.wrap(nn.Module, "to_empty", make)
        patches.wrap(utils, "_sync_params_and_buffers", lambda each: self._around(each, fail))

    def _around(self, original: AnyCallable, fail: Callable[[Exception], None]) -> AnyCallable:
        """DDP writes what rank 0 holds into the tensors of all ranks, rank 0 included."""

        @wrap_like(original)
        def sync(*args: Untyped, **kwargs: Untyped) -> object:
            untouched: list[torch.Tensor] = []
            with guard(fail):
                untouched = [each for each in self._left if self._is_untouched(each)]
            result = original(*args, **kwargs)
            with guard(fail):
                for each in untouched:
                    self._left[each] = self._left[each]._replace(versions=_versions(each))
            return result

        return sync

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        left = self._left.get(tensor)
        return left is not None and left.versions == _versions(tensor)

    def _read(self, tensors: list[torch.Tensor]) -> None:
        pending = contents([local_part(each) for each in tensors])
        pending.guard()
        for number, tensor in enumerate(tensors):
            self._left[tensor] = _Left(pending, number, _versions(tensor))

    def digest(self, tensor: torch.Tensor) -> str:
        """Return the digest of what was left in a tensor; empty if it is unknown or written to."""
        left = self._left.get(tensor)
        found = left.contents.take() if left is not None and self._is_untouched(tensor) else None
        content = None if left is None or found is None else found[left.place]
        return "" if content is None else content.digest


def _versions(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(each._version for each in (tensor, local_part(tensor)) if not each.is_inference())


def _tensors_in(root: nn.Module) -> Iterator[torch.Tensor]:
    found = {
        id(tensor): tensor
        for module in root.modules()
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        if tensor is not None
    }
    yield from found.values()
