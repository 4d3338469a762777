"""Short names of models: the class, with a number from the second one on."""

from __future__ import annotations

from torch import nn

from distdiag.probes.by_identity import WeakMap
from distdiag.probes.keepers import unwrapped


def class_of(root: nn.Module) -> str:
    """Return the name of a model's own class, whatever wraps it."""
    return type(unwrapped(root)).__name__.removeprefix("FSDP")


class ModelNames:
    """Gives each model a name that it keeps."""

    def __init__(self) -> None:
        """Have named none."""
        self._names: WeakMap[nn.Module, str] = WeakMap()
        self._num_names: dict[str, int] = {}

    def name(self, root: nn.Module) -> str:
        """Return the name of a model."""
        name = self._names.get(root)
        if name is None:
            kind = class_of(root)
            number = self._num_names[kind] = self._num_names.get(kind, 0) + 1
            name = self._names[root] = kind if number == 1 else f"{kind}#{number}"
        return name
