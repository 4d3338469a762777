"""The forward passes of modules that are going on, and what the calls of torch in them are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from distdiag.probes.router_modules import expert_counts, is_meant_random, routing_modules
from distdiag.probes.routing_mode import RoutingMode
from distdiag.unordered_ops import BACKWARD, FORWARD

_NAMES: Final = FORWARD | BACKWARD
_DROPOUTS: Final = frozenset(
    ("dropout", "dropout_", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
)


@dataclass(frozen=True, slots=True)
class Router:
    """What a module that may route says of itself."""

    counts: frozenset[int]
    is_meant_random: bool


@dataclass(slots=True)
class OpenCall:
    """A forward pass of a module that has begun."""

    module: nn.Module
    name: str
    router: Router | None
    outer: str
    number: int
    is_recompute: bool
    given: dict[str, str]
    is_meant_random: bool
    rows: tuple[str, ...] = ()
    num_choices: int = 0
    ops: dict[str, None] = field(default_factory=dict)
    is_drawn: bool = False


class CallMode(RoutingMode):
    """Tells, besides what `RoutingMode` tells, of calls whose result may be another one again."""

    def __init__(
        self,
        on_choice: Callable[..., None],
        on_draw: Callable[[], None],
        stack: list[OpenCall],
        fail: Callable[[Exception], None],
    ) -> None:
        """Tell these, and note calls in the innermost of the `stack`."""
        super().__init__(on_choice, on_draw, lambda _: None, fail=fail)
        self._stack = stack

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the call."""
        name = getattr(func, "__name__", "")
        if name in _NAMES and self._stack:
            self._stack[-1].ops[name] = None
        elif name in _DROPOUTS:
            self._on_draw()
        return super().__torch_function__(func, types, args, kwargs)


class OpenCalls(threading.local):
    """The calls that a thread is in the middle of, the innermost last."""

    def __init__(self) -> None:
        """Be in the middle of none."""
        self.stack: list[OpenCall] = []
        self.mode: CallMode | None = None

    def begin(self, call: OpenCall, make: Callable[[], CallMode]) -> None:
        """Enter a call; the mode is there within the outermost one."""
        self.stack.append(call)
        if self.mode is None:
            self.mode = make()
            self.mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module) -> OpenCall | None:
        """Leave the call of a module, and those within it that never said so."""
        found = None
        if any(call.module is module for call in self.stack):
            while found is None or found.module is not module:
                found = self.stack.pop()
        if not self.stack and self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return found

    def router(self) -> OpenCall | None:
        """Return the innermost call of a module that may route."""
        return next((call for call in reversed(self.stack) if call.router is not None), None)

    def counts(self) -> frozenset[int]:
        """Return how many experts there may be, by what the modules around say."""
        routers = (call.router for call in self.stack if call.router is not None)
        return frozenset().union(*(router.counts for router in routers))

    def is_meant_random(self, name: str, router: Router | None) -> bool:
        """Say whether the options of a router, or of the module that it belongs to, ask for it."""
        if router is None or not self.stack:
            return router is not None and router.is_meant_random
        around = self.stack[-1]
        is_part = name.rpartition(".")[0] == around.name
        return router.is_meant_random or (is_part and around.is_meant_random)


def routers_of(roots: list[nn.Module]) -> dict[int, Router]:
    """Return the modules of these models that may route, by their ids."""
    return {
        id(module): Router(expert_counts(module), is_meant_random(module))
        for root in roots
        for _, module in routing_modules(root)
    }


def is_in_backward() -> bool:
    """Say whether this thread runs a backward pass, so that a forward pass is a repeated one."""
    return bool(torch._C._current_graph_task_id() != -1)
