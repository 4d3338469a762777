"""What `to_empty` left in the tensors that it made: whoever still holds that was never written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import own_buffers, own_parameters
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.untyped import Untyped


class EmptiedTensors:
    """Reads the fresh memory of tensors; it is never written to."""

    def __init__(self) -> None:
        self._left: WeakMap[torch.Tensor, tuple[Pending, int]] = WeakMap()

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

    def _read(self, tensors: list[torch.Tensor]) -> None:
        pending = contents([local_part(each) for each in tensors])
        pending.guard()
        for number, tensor in enumerate(tensors):
            self._left[tensor] = (pending, number)

    def digest(self, tensor: torch.Tensor) -> str:
        """Return the digest of what was left in a tensor; empty if unknown or not made so."""
        pending, number = self._left.get(tensor) or (None, 0)
        found = None if pending is None else pending.take()
        content = None if found is None else found[number]
        return "" if content is None else content.digest


def _tensors_in(root: nn.Module) -> Iterator[torch.Tensor]:
    found = {
        id(tensor): tensor
        for module in root.modules()
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        if tensor is not None
    }
    yield from found.values()
