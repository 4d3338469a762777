"""Puts hooks on the modules of a model that may route, and takes them away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from distdiag.probes.by_identity import WeakMembers
from distdiag.probes.keepers import keeper_of
from distdiag.probes.model_names import ModelNames
from distdiag.probes.module_hook import ModuleHook
from distdiag.probes.router_modules import (
    expert_counts,
    is_meant_random,
    is_named,
    is_router,
    routing_modules,
)
from distdiag.probes.routing_pass import Layer


class RoutingHooks:
    """The hooks of all models that are looked at now."""

    def __init__(
        self,
        patterns: Sequence[str],
        begin: Callable[[Layer, nn.Module, object], None],
        leave: Callable[[Layer, nn.Module, object], None],
        miss: Callable[[str, str], None],
    ) -> None:
        """Call these, which raise nothing; `patterns` are names of modules that route.

        `miss` is told the names of modules that cannot be looked at, and why.
        """
        self._patterns = tuple(patterns)
        self._begin = begin
        self._leave = leave
        self._miss = miss
        self._missed: set[str] = set()
        self._names = ModelNames()
        self._handles: list[Any] = []
        self._hooked: WeakMembers[nn.Module] = WeakMembers()
        self.layers: list[Layer] = []

    def __contains__(self, root: nn.Module) -> bool:
        """Say whether the modules of this model have hooks."""
        return root in self._hooked

    def add(self, root: nn.Module) -> None:
        """Put hooks on the modules of a model, on each once."""
        keeper = keeper_of(root, "")
        members = keeper.ranks if keeper is not None else ()
        self._hooked.add(root)
        known = {number for number, _ in self._handles}
        for name, module in routing_modules(root, self._patterns):
            if id(module) in known:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                self._tell_missed(f"{self._names.name(root)}: {name}")
                continue
            layer = Layer(
                self._names.name(root),
                name,
                members,
                expert_counts(module),
                is_meant_random(module),
                is_named(name, self._patterns),
                is_router(module),
            )
            self.layers.append(layer)
            before, after = ModuleHook(self._entering(layer)), ModuleHook(self._leaving(layer))
            handles = (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            )
            self._handles.extend((id(module), handle) for handle in handles)

    def _tell_missed(self, name: str) -> None:
        if name not in self._missed:
            self._missed.add(name)
            self._miss(name, "TorchScript runs the module, and calls nothing in Python")

    def remove(self) -> None:
        """Take all hooks away."""
        while self._handles:
            self._handles.pop()[1].remove()
        self.layers.clear()
        self._hooked.clear()

    def _entering(self, layer: Layer) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            self._begin(layer, module, (args, kwargs))

        return enter

    def _leaving(self, layer: Layer) -> Callable[..., None]:
        def leave(module: nn.Module, _: Any, result: Any) -> None:  # noqa: ANN401
            self._leave(layer, module, result)

        return leave
