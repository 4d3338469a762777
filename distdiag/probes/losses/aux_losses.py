"""Sees which auxiliary losses modules compute that route, and whether a backward pass uses them.

Hooks of the graph note that a gradient came by; they go with the graph, and keep nothing alive.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.losses.score_marks import origin_of
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.untyped import Untyped
from distdiag.record.signals import Signal

_MOST_SCALARS: Final = 16
_MOST_PASSES: Final = 1024
_PRODUCTS: Final = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__"})
_COEFFICIENT: Final = re.compile(
    r"(aux|balanc)\w*(alpha|coef|factor|lambda|scale|weight)|(alpha|coef|weight)\w*(aux|balanc)"
)


@dataclass(slots=True)
class Use:
    """Which parts of one layer's graph a backward pass has come by, for one forward pass."""

    is_routed: bool = False
    num_scalars: int = 0
    num_injected: int = 0
    is_used: bool = False
    coefficient: str = ""
    site: CallSite | None = None


@dataclass(slots=True)
class _Found:
    """Nodes of a forward pass that has not ended."""

    scores: list[tuple[str, Any]] = field(default_factory=list)
    scalars: deque[tuple[Any, str, CallSite]] = field(
        default_factory=lambda: deque(maxlen=_MOST_SCALARS)
    )
    injected: list[tuple[Any, Any, CallSite]] = field(default_factory=list)
    detached: list[tuple[str, str, CallSite]] = field(default_factory=list)


class AuxLosses:
    """What modules that route have computed of their scores, since the last step."""

    def __init__(
        self,
        module: Callable[[], nn.Module | None],
        site: Callable[[], CallSite],
        fail: Callable[[Exception], None],
        injected: Signal[Any] | None = None,
    ) -> None:
        """Nothing was computed yet; `module` is the one that routes now, if it is looked at.

        `injected` gets the nodes of auxiliary losses that are injected.
        """
        self._module = module
        self._site = site
        self._fail = fail
        self._injected = injected or Signal()
        self._patches = Patches()
        self._is_on = False
        self._passes: deque[dict[str, Use]] = deque(maxlen=_MOST_PASSES)
        self._found = _Found()
        self._has_used: dict[str, bool] = {}
        self._meant: set[str] = set()

    @property
    def has_unused(self) -> bool:
        """Whether a layer has an auxiliary loss that no backward pass has come by so far."""
        return not all(self._has_used.values())

    @property
    def has_forgotten(self) -> bool:
        """Whether one of these has a coefficient, or is given to a function that injects it."""
        return any(not self._has_used[layer] for layer in self._meant)

    def is_doubtful(self) -> bool:
        """Say whether modules are looked at now, to see if what was not used so far is used."""
        return self._is_on and self.has_unused

    def begin(self) -> None:
        """Look at what functions of the program return, until `end`."""
        if not self._is_on:
            self._is_on = True
            tell = self.saw_injection
            self._patches.wrap(torch.autograd.Function, "apply", lambda f: injecting(f, tell))

    def end(self) -> None:
        """Let them be."""
        self._is_on = False
        self._patches.undo()

    def saw_scores(self, layer: str, nodes: Sequence[Any]) -> None:
        """Take note of scores that chose experts, and of what they were made of."""
        if self._module() is not None:
            self._found.scores.extend((layer, node) for node in nodes)

    def saw_scalar(self, scalar: torch.Tensor) -> None:
        """Take note of one number that was computed with a graph."""
        with guard(self._fail):
            module = self._module()
            if module is not None:
                self._found.scalars.append((scalar.grad_fn, coefficient_of(module), self._site()))

    def saw_call(self, name: str, args: Sequence[Any], result: object) -> None:
        """Take note of one number without a graph that a module scales as its auxiliary loss."""
        with guard(self._fail):
            if name in _PRODUCTS and _is_plain_number(result):
                self._saw_product(args)

    def _saw_product(self, args: Sequence[Any]) -> None:
        module, found = self._module(), self._found
        if module is None or not found.scores or len(found.detached) >= _MOST_SCALARS:
            return
        text = coefficient_of(module)
        if text and any(text.endswith(f" = {each:g}") for each in args if type(each) is float):
            found.detached.append((found.scores[-1][0], text, self._site()))

    def saw_injection(self, result: object, scalar: object) -> None:
        """Take note of a function of the program that was given one number beside a tensor."""
        with guard(self._fail):
            if self._module() is not None and len(self._found.injected) < _MOST_SCALARS:
                self._found.injected.append((result, scalar, self._site()))

    def settle(self) -> None:
        """Watch what was found: the forward pass has ended, and all scores are marked."""
        found, self._found = self._found, _Found()
        if not found.scores:
            return
        uses: dict[str, Use] = {}
        for layer, node in found.scores:
            _when_reached(node, uses.setdefault(layer, Use()), "is_routed")
        for node, coefficient, site in found.scalars:
            for use in _uses_of(node, uses):
                use.num_scalars += 1
                use.coefficient = use.coefficient or coefficient
                use.site = site
                _when_reached(node, use, "is_used")
        for result, scalar, site in found.injected:
            used = _uses_of(scalar, uses)
            for use in used:
                use.num_injected += 1
                use.site = site
                _when_reached(result, use, "is_used")
            if used:
                self._injected.emit(scalar)
        for layer, coefficient, site in found.detached:
            if not uses[layer].num_scalars:
                uses[layer].num_scalars = 1
                uses[layer].coefficient = coefficient
                uses[layer].site = site
        self._passes.append(uses)

    def note_used(self, layers: Sequence[str]) -> None:
        """Take note that a loss holds a term that is made of the scores of these layers."""
        for uses in self._passes:
            for layer in layers:
                if layer in uses:
                    uses[layer].is_used = True

    def take(self, models: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield what became of the auxiliary losses since the last step, by the layers' models."""
        by_layer: dict[str, list[Use]] = {}
        while self._passes:
            for layer, use in self._passes.popleft().items():
                if use.is_routed:
                    by_layer.setdefault(layer, []).append(use)
        for layer, uses in by_layer.items():
            sites = [use.site for use in uses if use.site is not None]
            if sites and layer in models:
                is_used = any(use.is_used for use in uses)
                self._has_used[layer] = is_used or self._has_used.get(layer, False)
                if any(use.coefficient or use.num_injected for use in uses):
                    self._meant.add(layer)
                yield {
                    "model": models[layer],
                    "layer": layer,
                    "num_passes": len(uses),
                    "num_computed": sum(use.num_scalars > 0 for use in uses),
                    "num_injected": sum(use.num_injected > 0 for use in uses),
                    "num_used": sum(use.is_used for use in uses),
                    "coefficient": next((u.coefficient for u in uses if u.coefficient), ""),
                    "site": sites[-1],
                }


def _uses_of(node: object, uses: dict[str, Use]) -> list[Use]:
    origin = origin_of(node)
    layers = {mark.layer for mark in origin.marks.values()} if origin is not None else set()
    return [uses[layer] for layer in layers if layer in uses]


def _when_reached(node: Untyped, use: Use, name: str) -> None:
    def reached(_: object) -> None:
        setattr(use, name, True)

    # The node of a function of the program may go with its result: then nothing comes back by it.
    with contextlib.suppress(RuntimeError):
        node.register_prehook(reached)


def coefficient_of(module: nn.Module) -> str:
    """Return ``aux_loss_coef = 0.01`` if a module has a coefficient of its own that is not 0."""
    for name, value in vars(module).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and value > 0 and _COEFFICIENT.search(name):
            return f"{name} = {value:g}"
    return ""


def is_scalar(value: object) -> bool:
    """Say whether this is one number with a graph."""
    return (
        type(value) is torch.Tensor
        and value.numel() == 1
        and value.grad_fn is not None
        and value.is_floating_point()
    )


def _is_plain_number(value: object) -> bool:
    is_number = type(value) is torch.Tensor and value.dim() == 0 and value.is_floating_point()
    return is_number and not value.requires_grad  # type: ignore[attr-defined]


def injecting(function: AnyCallable, tell: Callable[[Any, Any], None]) -> AnyCallable:
    """Wrap `Function.apply`: tell the nodes of results that are like a tensor given with a number.

    `tell` raises nothing.
    """

    @wrap_like(function)
    def apply(cls: object, *args: object, **kwargs: object) -> object:
        result = function(cls, *args, **kwargs)
        if not torch.compiler.is_compiling() and type(result) is torch.Tensor:
            with out_of_sight():
                scalar = _injected(args, result)
                if scalar is not None:
                    tell(result.grad_fn, scalar.grad_fn)
        return result

    return apply


def _injected(args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor | None:
    """Return the one number that was given beside a tensor like the result."""
    if result.grad_fn is None or result.dim() == 0:
        return None
    scalars = [each for each in args if is_scalar(each) and each.dim() == 0]
    is_like = any(
        isinstance(each, torch.Tensor) and each.dim() and each.shape == result.shape
        for each in args
    )
    return scalars[0] if is_like and len(scalars) == 1 else None
