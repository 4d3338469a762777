"""The places in a module for which a checkpoint holds a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from distdiag.probes.module_parts import own_buffers, own_parameters

_COUNTER = "num_batches_tracked"  # old checkpoints lack it, and torch itself copes with that


class Slot(NamedTuple):
    """One parameter or persistent buffer, by the module that has it."""

    owner: weakref.ref[nn.Module]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells this place from others while the module lives."""
        return id(self.owner()), self.name

    def tensor(self) -> torch.Tensor | None:
        """Return what is there now."""
        module = self.owner()
        if module is None:
            return None
        found = own_parameters(module).get(self.name)
        return own_buffers(module).get(self.name) if found is None else found


def slots_of(root: nn.Module) -> Iterator[tuple[str, Slot, torch.Tensor]]:
    """Yield name, place and tensor of what a checkpoint of a module should hold."""
    for path, module in root.named_modules(remove_duplicate=False):
        here = weakref.ref(module)
        hidden = module._non_persistent_buffers_set
        named = [*own_parameters(module).items(), *own_buffers(module).items()]
        for name, tensor in named:
            if tensor is not None and name not in hidden and name != _COUNTER:
                yield f"{path}.{name}" if path else name, Slot(here, name), tensor
