"""Which of the tensors that a module keeps a forward pass has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from distdiag.probes.module_parts import own_buffers
from distdiag.probes.tensor_content import Pending, contents

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
