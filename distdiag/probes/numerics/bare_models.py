"""The forward passes of models that nothing wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distdiag.probes.models.modules import ModuleHook, is_compiled
from distdiag.probes.models.registry import LiveModels
from distdiag.probes.models.wrappers import is_wrapped
from distdiag.probes.tensors.by_identity import WeakMap

Enter = Callable[[object, nn.Module, object], None]
Leave = Callable[[object, object], None]


class BareModels:
    """Tells of forward passes by two hooks of each model."""

    def __init__(self, models: LiveModels, enter: Enter, leave: Leave) -> None:
        """Call these, which raise nothing, before and after."""
        self._models = models
        self._enter = enter
        self._leave = leave
        self._num_seen = -1
        self._hooked: WeakMap[nn.Module, tuple[Any, Any]] = WeakMap()

    @property
    def is_current(self) -> bool:
        """Whether no model has been made since the last look; asked for each batch."""
        return self._num_seen == self._models.count

    def find(self) -> None:
        """Look for models that have been made since."""
        roots = self._models.roots()
        if roots:
            self._num_seen = self._models.count
            for root in roots:
                self.add(root)

    def add(self, root: nn.Module) -> None:
        """See the forward passes of a model from now on, if it is trained and can be looked into.

        What is wrapped later tells of itself: the model is in the middle of that pass then.
        """
        is_closed = isinstance(root, torch.jit.ScriptModule) or is_compiled(root)
        # A layer of this kind computes in another way in evaluation where it has a hook.
        is_fast = isinstance(root, nn.TransformerEncoderLayer)
        if is_closed or is_fast or root in self._hooked or is_wrapped(root):
            return
        if not any(parameter.requires_grad for parameter in root.parameters()):
            return

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            self._enter(module, module, (args, kwargs))

        def after(module: nn.Module, _: object, output: object) -> None:
            self._leave(module, output)

        self._hooked[root] = (
            root.register_forward_pre_hook(ModuleHook(before), with_kwargs=True),
            root.register_forward_hook(ModuleHook(after)),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for root in list(self._hooked):
            for hook in self._hooked.pop(root):
                hook.remove()
