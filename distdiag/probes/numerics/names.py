"""The names of parameters and buffers that were read, found when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from distdiag.probes.models.modules import clean_name, own_buffers, own_parameters
from distdiag.probes.models.registry import ModelNames
from distdiag.probes.models.wrappers import sharded_parameters, walk
from distdiag.probes.numerics.modules import class_name
from distdiag.probes.numerics.ranges import Reading

_WORDS = {"gradient": "the gradient of its", "weight-gradient": "the gradient of its"}


class TensorNames:
    """Names what models hold."""

    def __init__(self, roots: Callable[[], Sequence[nn.Module]], models: ModelNames) -> None:
        """`roots` returns the models that there are."""
        self._roots = roots
        self._models = models

    def name(self, reading: Reading) -> None:
        """Say in a reading of a parameter which one it is."""
        if reading.parameter is None:
            return
        tensor, reading.parameter = reading.parameter(), None
        word = _WORDS.get(reading.stage, "its")
        reading.what = f"{word} parameter"
        for root in self._roots() if tensor is not None else ():
            for module, name, held in _held(root):
                if held is tensor:
                    reading.model = self._models.name(root)
                    reading.module, reading.kind = module
                    reading.what = f"{word} {name}"
                    return


def _held(root: nn.Module) -> Iterator[tuple[tuple[str, str], str, torch.Tensor]]:
    """Yield each tensor of a model: path and class of the module, its name in it, itself."""
    tree = list(walk(root))
    sharded = sharded_parameters(tree)
    for path, module, _ in tree:
        place = (clean_name(path), class_name(module))
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            record = sharded.get((id(module), name))
            if record is not None:
                yield place, name, record.sharded_param
            if tensor is not None:
                yield place, name, tensor
