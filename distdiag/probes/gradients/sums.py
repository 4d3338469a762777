"""Writes down sums over gradients as backward passes give them, and as optimizers find them.

Whatever combines or scales a gradient in between (a wrapper, hooks, the program itself) is linear,
so these sums tell what came of it, without knowing who did it and in what way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.gradients import AutogradNode, GradientSum, GradientSums
from distdiag.probes.base import Probe
from distdiag.probes.compiled_passes import is_compiled_pass
from distdiag.probes.gradients.exchange_graph import ExchangeReading, ways_from
from distdiag.probes.gradients.leaves import Kept, KeptBy, Leaf, chosen, leaves_of
from distdiag.probes.gradients.weighted_sums import NUM_SUMS, PendingValues, weighted_sums
from distdiag.probes.guard import guard, guarded, guarded_if
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.own_steps import FIRST_STEPS, is_due
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_MOST_MODELS: Final = 8
_MOST_WAITING: Final = 16
_MOST_PASSES: Final = 64
"""The passes of a step with more are not read."""

_FIRST_PASSES: Final = 4
_LAST_PASSES: Final = 3
"""So many are told apart; those between are added up."""


@dataclass(slots=True)
class _Sums:
    """What is known of one parameter: vectors of sums, and after them that of the squares."""

    leaf: Leaf
    passes: dict[int, torch.Tensor] = field(default_factory=dict)
    left: torch.Tensor | None = None
    applied: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    applied_parts: int = 0
    rounding: float = 0.0
    is_unreadable: bool = False

    def vectors(self) -> list[torch.Tensor]:
        """Return all of them, in an order of its own."""
        others = (self.left, self.applied, self.weight)
        return [*self.passes.values(), *(each for each in others if each is not None)]


@dataclass(slots=True)
class _Model:
    sums: list[_Sums]
    kept: Kept


@dataclass(slots=True)
class _Window:
    """The passes that lead to one step."""

    step: int
    site: CallSite
    num_passes: int = 0
    models: dict[str, _Model] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    exchanges: ExchangeReading | None = None
    factors: list[float] = field(default_factory=list)
    pending: PendingValues | None = None
    handles: list[Any] = field(default_factory=list)

    def sums(self) -> Iterator[_Sums]:
        """Yield those of all models."""
        for model in self.models.values():
            yield from model.sums


class Moments(NamedTuple):
    """When to look, as `Signals` says."""

    exchange_known: Signal[[]]
    backward_started: Signal[object]
    optimizer_stepping: Signal[Any, FrameType]
    step_ended: Signal[[]]


class GradientSumProbe(Probe):
    """Looks at the first steps, those of powers of two and every hundredth."""

    name: ClassVar[str] = "gradient-sums"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        models: Callable[[], Sequence[nn.Module]],
        name_of: Callable[[nn.Module], str],
        kept_by: Sequence[KeptBy] = (),
    ) -> None:
        """Know of no pass yet; `models` returns those that there are, `name_of` their names.

        `kept_by` tell what libraries keep of their gradients.
        """
        super().__init__(recorder)
        self._moments = moments
        self._live_models = models
        self._has_exchanged = False
        self._name_of = name_of
        self._kept_by = kept_by
        self._num_opened = 0
        self._window: _Window | None = None
        self._waiting: deque[_Window] = deque(maxlen=_MOST_WAITING)

    def _install(self) -> None:
        self._subscribe(self._moments.exchange_known, self._know_exchange)
        self._subscribe(self._moments.backward_started, self._before_backward)
        self._subscribe(self._moments.optimizer_stepping, self._before_update)
        self._subscribe(self._moments.step_ended, self._after_step)

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
    def _know_exchange(self) -> None:
        self._has_exchanged = True

    @guarded
    def _before_backward(self, outputs: object) -> None:
        self._write()
        if self._window is not None and self._window.handles:
            self._begin_pass(self._window, outputs)  # a further pass of the same step
            return
        self._close()
        step = self.recorder.step
        is_alone = not dist.is_initialized() or dist.get_world_size() < 2
        # Some libraries step once before there is any gradient.
        is_wanted = is_due(step) or self._num_opened < FIRST_STEPS
        if not is_alone and is_wanted and not is_compiled_pass():
            self._num_opened += 1
            self._open(step, outputs)

    def _open(self, step: int, outputs: object) -> None:
        _, frames = self.recorder.backward or ((), ())
        window = self._window = _Window(step, CallSite(frames))
        experts: set[int] = set()
        if self._has_exchanged:
            ways = ways_from(_roots(outputs))
            experts = {id(leaf) for way in ways[1:] for leaf in way.leaves}
            experts -= {id(leaf) for way in ways[:1] for leaf in way.leaves}
            window.exchanges = ExchangeReading(ways, self.recorder, self.fail)
        for model in self._live_models()[:_MOST_MODELS]:
            kept = next(filter(None, (ask(model) for ask in self._kept_by)), Kept())
            leaves = leaves_of(model, kept)
            window.names |= {id(leaf.leaf): leaf.name for leaf in leaves}
            sums = [_Sums(leaf) for leaf in chosen(leaves, experts)]
            if sums:
                window.models[self._name_of(model)] = _Model(sums, kept)
            for each in sums:
                self._watch(window, each)
        self._begin_pass(window, outputs)

    def _begin_pass(self, window: _Window, outputs: object) -> None:
        window.num_passes += 1
        if any(model.kept.loss_scale != 1.0 for model in window.models.values()):
            self._read_factors(window, _roots(outputs))

    def _read_factors(self, window: _Window, roots: Sequence[Untyped]) -> None:
        """Read what a loss is multiplied by, and what the gradient of its pass begins with."""
        window.factors += _factors(roots)

        def hook(given: Sequence[torch.Tensor | None]) -> None:
            if window.handles and not torch.compiler.is_compiling():
                with guard(self.fail):
                    window.factors += map(_number, given)

        window.handles += [root.register_prehook(hook) for root in roots]

    def _watch(self, window: _Window, sums: _Sums) -> None:
        leaf = sums.leaf.leaf
        if leaf.grad is not None and not sums.leaf.members:
            sums.left = self._read(sums, [(leaf.grad, 0)])
        elif any(part.held.grad is not None for part in sums.leaf.parts):
            sums.left = self._read(sums, _gradients(sums.leaf))
        handle = leaf.register_hook(self._hook(window, sums))  # type: ignore[no-untyped-call]
        _run_first(leaf._backward_hooks, handle.id)
        window.handles.append(handle)

    def _hook(self, window: _Window, sums: _Sums) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.is_off or torch.compiler.is_compiling():
                return
            with guard(self.fail):
                if window.num_passes > _MOST_PASSES:
                    sums.is_unreadable = True
                    return
                found, known = self._read(sums, [(sums.leaf.of(gradient), 0)]), sums.passes
                if found is not None:
                    number = window.num_passes - 1
                    known[number] = known[number] + found if number in known else found

        return hook

    def _read(self, sums: _Sums, parts: list[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
        """Return the sums over parts of the parameter, each with the number of its first element.

        What is read once is read always: a sum that lacks a pass would tell something else.
        """
        total = None
        for tensor, first in parts:
            local = local_part(tensor).detach()
            if not is_readable(local) or not local.dtype.is_floating_point:
                sums.is_unreadable = True
                return None
            sums.rounding = max(sums.rounding, torch.finfo(local.dtype).eps / 2)
            found = weighted_sums(local, sums.leaf.num_elements, first)
            total = found if total is None else total + found
        return total

    @guarded_if("_window")
    def _before_update(self, optimizer: object, _: FrameType) -> None:
        window = self._window
        if window is None or not isinstance(optimizer, torch.optim.Optimizer):
            return
        owned = {id(parameter) for parameter in parameters_of(optimizer)}
        for sums in window.sums():
            is_new = sums.applied is None and sums.passes
            parts = sums.leaf.parts
            # Of one that is sharded this rank may hold nothing at all.
            is_here = parts and all(id(p.held) in owned for p in parts)
            if is_new and (is_here or (not parts and sums.leaf.num_copies)):
                gradients = _gradients(sums.leaf)
                if len(gradients) == len(parts):
                    sums.applied = self._read(sums, gradients) if parts else _nothing(sums)
                    sums.weight = self._read(sums, _weights(sums.leaf)) if parts else _nothing(sums)

    @guarded_if("_window")
    def _after_step(self) -> None:
        if self._window is not None:
            _let_go(self._window)

    # Writing down

    def _close(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        _let_go(window)
        tensors = [vector for sums in window.sums() for vector in sums.vectors()]
        if window.exchanges is not None:
            tensors += window.exchanges.vectors()
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            window.pending = PendingValues(tensors)
            self._waiting.append(window)

    def _write(self) -> None:
        while self._waiting:
            window = self._waiting[0]
            found = window.pending.take() if window.pending is not None else []
            if found is None:
                return
            self._waiting.popleft()
            values = iter(found)
            gradients = {
                name: tuple(
                    _result(sums, [next(values) for _ in sums.vectors()], window.num_passes)
                    for sums in model.sums
                )
                for name, model in window.models.items()
            }
            nodes: tuple[AutogradNode, ...] = ()
            if window.exchanges is not None:
                nodes = window.exchanges.nodes(list(values), window.names)
            for name, sums in gradients.items():
                if any(each.passes for each in sums):
                    self._tell(window, name, sums, nodes)

    def _tell(
        self,
        window: _Window,
        name: str,
        sums: tuple[GradientSum, ...],
        nodes: tuple[AutogradNode, ...],
    ) -> None:
        kept = window.models[name].kept
        self.recorder.event(
            GradientSums,
            step=window.step,
            model=name,
            gradients=sums,
            nodes=nodes,
            site=window.site,
            num_passes=window.num_passes,
            loss_scale=kept.loss_scale,
            loss_factor=max(window.factors, key=_rank_of, default=math.nan),
            unread=kept.unread,
        )


def _rank_of(factor: float) -> float:
    return math.inf if math.isnan(factor) else factor


def _run_first(hooks: Untyped, number: int) -> None:
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


def _gradients(leaf: Leaf) -> list[tuple[torch.Tensor, int]]:
    """Return what an optimizer finds in the parts that it holds."""
    return [(p.of(p.held.grad), p.first) for p in leaf.parts if p.held.grad is not None]


def _weights(leaf: Leaf) -> list[tuple[torch.Tensor, int]]:
    return [(part.of(part.held), part.first) for part in leaf.parts]


def _nothing(sums: _Sums) -> torch.Tensor:
    return torch.zeros_like(next(iter(sums.passes.values())))


def _result(sums: _Sums, vectors: list[tuple[float, ...]], num_passes: int) -> GradientSum:
    left = iter(vectors)
    leaf, there = sums.leaf, not sums.is_unreadable
    none = (0.0,) * (NUM_SUMS + 1)
    passes = [next(left) if number in sums.passes else none for number in range(num_passes)]
    joined = _joined(passes) if there and sums.passes else []
    others = [() if each is None else next(left) for each in (sums.left, sums.applied, sums.weight)]
    before, applied, weight = (each if there else () for each in others)
    return GradientSum(
        name=leaf.name,
        num_elements=leaf.num_elements,
        members=leaf.members,
        num_copies=leaf.num_copies,
        weight=weight[0] if weight else math.nan,
        passes=tuple(each[:-1] for each in joined),
        norms=tuple(math.sqrt(max(each[-1], 0.0)) for each in joined),
        left=before[:-1],
        applied=applied[:-1],
        rounding=sums.rounding,
        is_table=leaf.is_table,
    )


def _joined(passes: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Add up the passes in the middle if there are many."""
    if len(passes) <= _FIRST_PASSES + _LAST_PASSES + 1:
        return passes
    middle = zip(*passes[_FIRST_PASSES:-_LAST_PASSES], strict=True)
    return [
        *passes[:_FIRST_PASSES],
        tuple(map(math.fsum, middle)),
        *passes[-_LAST_PASSES:],
    ]


# What a loss was multiplied by


_MOST_NODES: Final = 64
_SCALING: Final = ("MulBackward0", "DivBackward0")


def _factors(roots: Sequence[Untyped]) -> list[float]:
    """Return the numbers that stand beside the loss in the first nodes of its graph."""
    found: list[float] = []
    waiting = list(roots)
    for node in waiting:  # it grows meanwhile
        if node.name() in _SCALING:
            found += [
                _number(each)
                for each in (node._saved_other, node._saved_self)
                if isinstance(each, torch.Tensor) and each.dim() == 0 and not each.requires_grad
            ]
        if len(waiting) < _MOST_NODES:
            waiting += [child for child, _ in node.next_functions if child is not None]
    return found


def _number(tensor: torch.Tensor | None) -> float:
    """Return the greatest value of what lies on a CPU: to read it elsewhere is to wait."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().max()) if tensor.device.type == "cpu" else math.nan


def _roots(outputs: object) -> list[Any]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    found = [getattr(tensor, "grad_fn", None) for tensor in tensors]
    return [node for node in found if node is not None]
