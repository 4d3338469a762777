"""What a module itself has, also where TorchScript keeps it.

The tables of a scripted module are none of Python's: they can neither be walked over nor asked for
what they do not have.
"""

from __future__ import annotations

import torch
from torch import nn


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that are parts of this one, without theirs."""
    return dict(module._modules.items())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return its own parameters, without those of its parts."""
    return dict(module._parameters.items())


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return its own buffers, without those of its parts."""
    return dict(module._buffers.items())
