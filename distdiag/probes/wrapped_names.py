"""Names of models under which ranks find each other's: the class, what wraps it, and a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from distdiag.probes.by_identity import WeakMap
from distdiag.probes.keepers import is_wrapped, walk
from distdiag.probes.model_names import class_of


class WrappedNames:
    """Gives each model a name that it keeps."""

    def __init__(self, roots: Callable[[], Iterable[nn.Module]]) -> None:
        """Have named none; `roots` are the models that there are."""
        self._roots = roots
        self._names: WeakMap[nn.Module, str] = WeakMap()
        self._num_models: dict[str, int] = {}

    def name(self, root: nn.Module) -> str:
        """Return the name of a model."""
        name = self._names.get(root)
        if name is None:
            kind = class_of(root)
            keepers = {keeper.kind for _, _, keeper in walk(root) if keeper.kind}
            kind = " ".join([*sorted(keepers), kind])
            number = self._num_models[kind] = self._num_models.get(kind, 0) + 1
            name = kind if number == 1 else f"{kind}#{number}"
            if not keepers and (number > 1 or self.num_alike(root) > 1):
                # With another number of them on another rank, nobody knows which is which.
                name = f"{kind} {number} of {self.num_alike(root)}"
            self._names[root] = name
        return name

    def num_alike(self, root: nn.Module) -> int:
        """Count the models of a class that nothing wraps: which is which is not known."""
        alike = [each for each in self._roots() if type(each) is type(root)]
        return sum(not is_wrapped(each) for each in alike)
