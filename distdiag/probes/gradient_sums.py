"""Writes down sums over gradients as backward passes give them, and as optimizers find them.

Whatever combines or scales a gradient in between (a wrapper, hooks, the program itself) is linear,
so these sums tell what came of it, without knowing who did it and in what way.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn

from distdiag.event import CallSite
from distdiag.gradient_event import GradientSum, GradientSums, Passage
from distdiag.probes.base import Probe
from distdiag.probes.exchange_graph import ways_from
from distdiag.probes.exchange_reading import ExchangeReading
from distdiag.probes.gradient_leaves import Leaf, chosen, leaves_of
from distdiag.probes.guard import guard, guarded
from distdiag.probes.optimizer_state import parameters_of
from distdiag.probes.own_steps import is_due
from distdiag.probes.tensor_bytes import is_readable
from distdiag.probes.tensor_content import Pending, contents
from distdiag.probes.tensor_plans import local_part
from distdiag.probes.weighted_sums import weighted_sum
from distdiag.recorder import Recorder

_MOST_MODELS: Final = 8
_MOST_WAITING: Final = 16
_FIGURES: Final = ("weight", "left", "given", "square", "applied")


@dataclass(slots=True)
class _Sums:
    """What is known of one parameter; figures are there when they have been read."""

    leaf: Leaf
    figures: dict[str, torch.Tensor] = field(default_factory=dict)
    is_unreadable: bool = False


@dataclass(slots=True)
class _Window:
    """The passes that lead to one step."""

    step: int
    site: CallSite
    models: dict[str, list[_Sums]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    exchanges: ExchangeReading | None = None
    pending: Pending | None = None
    handles: list[Any] = field(default_factory=list)


class GradientSumWatch(Probe):
    """Looks at the first steps and every hundredth."""

    name: ClassVar[str] = "gradient-sums"

    def __init__(self, recorder: Recorder, name_of: Callable[[nn.Module], str]) -> None:
        """Know of no pass yet; `name_of` says what a model is called."""
        super().__init__(recorder)
        self._name_of = name_of
        self._window: _Window | None = None
        self._waiting: deque[_Window] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self.recorder.on_graph.append(self._before_backward)
        self.recorder.on_update.append(self._before_update)
        self.recorder.on_step.append(self._after_step)

    def uninstall(self) -> None:
        """Take the hooks of the parameters away, too."""
        super().uninstall()
        if self._window is not None:
            _let_go(self._window)

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now."""
        self._close()
        self._write()

    # The moments

    @guarded
    def _before_backward(self, outputs: object) -> None:
        self._write()
        if self._window is not None and self._window.handles:
            return  # a further pass of the same step
        self._close()
        step = self.recorder.step
        is_alone = not dist.is_initialized() or dist.get_world_size() < 2
        if not is_alone and is_due(step) and not _is_compiled():
            self._open(step, outputs)

    def _open(self, step: int, outputs: object) -> None:
        _, frames = self.recorder.backward or ((), ())
        window = self._window = _Window(step, CallSite(frames))
        experts: set[int] = set()
        if self.recorder.has_exchanged:
            ways = ways_from(_roots(outputs))
            experts = {id(leaf) for way in ways[1:] for leaf in way.leaves}
            experts -= {id(leaf) for way in ways[:1] for leaf in way.leaves}
            window.exchanges = ExchangeReading(ways, self.recorder, self.fail)
        models = self.recorder.live_models() if self.recorder.live_models is not None else []
        for model in models[:_MOST_MODELS]:
            leaves = leaves_of(model)
            window.names |= {id(leaf.leaf): leaf.name for leaf in leaves}
            sums = [_Sums(leaf) for leaf in chosen(leaves, experts)]
            if sums:
                window.models[self._name_of(model)] = sums
            for each in sums:
                self._watch(window, each)

    def _watch(self, window: _Window, sums: _Sums) -> None:
        leaf = sums.leaf.leaf
        if sums.leaf.held.grad is not None:
            self._read(sums, "left", sums.leaf.held.grad, sums.leaf.first)
        handle = leaf.register_hook(self._hook(sums))  # type: ignore[no-untyped-call]
        _run_first(leaf._backward_hooks, handle.id)
        window.handles.append(handle)

    def _hook(self, sums: _Sums) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.is_off or torch.compiler.is_compiling():
                return
            with guard(self.fail):
                self._read(sums, "given", gradient, 0)

        return hook

    def _read(self, sums: _Sums, figure: str, tensor: torch.Tensor, first: int) -> None:
        local = local_part(tensor)
        if not is_readable(local):
            sums.is_unreadable = True
            return
        figures, shape = sums.figures, local_part(sums.leaf.leaf).shape
        total, square = weighted_sum(local.detach(), shape, first)
        figures[figure] = figures.get(figure, 0.0) + total
        if figure == "given":
            figures["square"] = figures.get("square", 0.0) + square

    @guarded
    def _before_update(self, optimizer: object) -> None:
        window = self._window
        if window is None or not isinstance(optimizer, torch.optim.Optimizer):
            return
        owned = {id(parameter) for parameter in parameters_of(optimizer)}
        for sums in (each for model in window.models.values() for each in model):
            held = sums.leaf.held
            is_new = "applied" not in sums.figures and "given" in sums.figures
            if id(held) in owned and held.grad is not None and is_new:
                self._read(sums, "applied", held.grad, sums.leaf.first)
                self._read(sums, "weight", held, sums.leaf.first)

    @guarded
    def _after_step(self) -> None:
        if self._window is not None:
            _let_go(self._window)

    # Writing down

    def _close(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        _let_go(window)
        tensors = [t for model in window.models.values() for s in model for t in _tensors(s)]
        if window.exchanges is not None:
            tensors += window.exchanges.scalars()
        window.pending = contents(tensors)
        self._waiting.append(window)

    def _write(self) -> None:
        while self._waiting:
            window = self._waiting[0]
            found = window.pending.take() if window.pending is not None else []
            if found is None:
                return
            self._waiting.popleft()
            values = iter([math.nan if each is None else each.mean for each in found])
            gradients = {
                name: tuple(
                    [_result(sums, [next(values) for _ in _tensors(sums)]) for sums in model]
                )
                for name, model in window.models.items()
            }
            passages: tuple[Passage, ...] = ()
            if window.exchanges is not None:
                passages = window.exchanges.passages(list(values), window.names)
            for name, sums in gradients.items():
                if any(not math.isnan(each.given) for each in sums):
                    self.recorder.event(
                        GradientSums,
                        step=window.step,
                        model=name,
                        gradients=sums,
                        passages=passages,
                        site=window.site,
                    )


def _run_first(hooks: Any, number: int) -> None:  # noqa: ANN401
    """Let a hook run before those that change the gradient.

    Autograd goes by the order of insertion, not by that of an OrderedDict.
    """
    others = [(key, hook) for key, hook in hooks.items() if key != number]
    hook = hooks[number]
    hooks.clear()
    hooks[number] = hook
    hooks.update(others)


def _let_go(window: _Window) -> None:
    while window.handles:
        window.handles.pop().remove()
    if window.exchanges is not None:
        window.exchanges.end()


def _tensors(sums: _Sums) -> list[torch.Tensor]:
    return [sums.figures[figure] for figure in _FIGURES if figure in sums.figures]


def _result(sums: _Sums, values: list[float]) -> GradientSum:
    there = [figure for figure in _FIGURES if figure in sums.figures]
    found = dict.fromkeys(_FIGURES, math.nan) | {"left": 0.0}
    if not sums.is_unreadable:
        found |= dict(zip(there, values, strict=True))
    leaf = sums.leaf
    return GradientSum(
        name=leaf.name,
        num_elements=leaf.leaf.numel(),
        members=leaf.members,
        num_copies=leaf.num_copies,
        weight=found["weight"],
        left=found["left"],
        given=found["given"],
        norm=math.sqrt(found["square"]) if found["square"] >= 0 else math.nan,
        applied=found["applied"],
        is_table=leaf.is_table,
    )


def _is_compiled() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _roots(outputs: object) -> list[Any]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    found = [getattr(tensor, "grad_fn", None) for tensor in tensors]
    return [node for node in found if node is not None]
