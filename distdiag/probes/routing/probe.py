"""Writes down how tokens are routed to experts, at the first steps of a model and every hundredth.

Hooks of the modules that may route are there only while a step is sampled; within their forward
passes a mode of torch's functions sees which calls choose.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.routing import AuxLoss, CounterWritten, CountsHeld, Routing, TokensExchanged
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guard, guarded
from distdiag.probes.losses.aux_losses import AuxLosses
from distdiag.probes.losses.score_marks import Mark, mark_scores
from distdiag.probes.models.modules import ModuleHook
from distdiag.probes.models.own_steps import EVERY
from distdiag.probes.models.registry import ModelNames
from distdiag.probes.models.wrappers import wrapper_of
from distdiag.probes.routing.mode import Chosen
from distdiag.probes.routing.modules import (
    expert_counts,
    is_meant_random,
    is_named,
    is_router,
    routing_modules,
)
from distdiag.probes.routing.passes import (
    Biases,
    Layer,
    Pass,
    Passes,
    changed_since,
    read,
    versions_of,
)
from distdiag.probes.routing.reading import RoutingReading
from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Pending
from distdiag.probes.tensors.sample_rows import tensors_in
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal, Unsubscribe

# At which steps of a model its routing is sampled.

FIRST_STEPS: Final = 4
FIRST_STEPS_IN_LIGHT: Final = 2
_IN_A_ROW: Final = 16


class SampledSteps:
    """The first steps, each hundredth, and more of them while an auxiliary loss was never used."""

    def __init__(self, aux: AuxLosses, *, is_light: bool) -> None:
        """Ask whether auxiliary losses are used; fewer first steps are due if it `is_light`."""
        self._aux = aux
        self._num_first = FIRST_STEPS_IN_LIGHT if is_light else FIRST_STEPS

    def is_due(self, step: int, first: int) -> bool:
        """Say whether to sample a step of a model that began at step `first`."""
        if step < first + self._num_first or step % EVERY == 0:
            return True
        # What is used every other step is met before a hundredth one, if not at it.
        is_before = (step + 1) % EVERY == 0 and self._aux.has_unused
        return is_before or (self._aux.has_forgotten and _is_in_a_row(step - first))


def _is_in_a_row(since: int) -> bool:
    """Say whether a step is one of the first ones of all, or after their number has doubled."""
    doubled = 1 << max(since.bit_length() - 1, 0)
    return since < _IN_A_ROW or since - doubled < min(doubled // 4, _IN_A_ROW)


# Finds the tensor that says which experts the tokens are for, where no call was seen to choose.

_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MOST_CHOSEN: Final = 64


def choice_in(
    value: object,
    given: torch.Tensor | None,
    counts: frozenset[int],
) -> Chosen | None:
    """Return the first tensor that can be a choice for the tokens of `given`, as one.

    It has a row for each token, and either some numbers of experts or a truth value for each of the
    `counts` experts. The scores are not known.
    """
    num_tokens = given.numel() // max(1, given.shape[-1]) if given is not None else None
    for tensor in tensors_in(value):
        if tensor.ndim < 2 or not tensor.numel() or not is_readable(tensor):
            continue
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        if num_tokens not in (None, len(rows)):
            continue
        if rows.dtype is torch.bool and (not counts or rows.shape[1] in counts):
            return _of_map(rows)
        if rows.dtype in _INTEGERS and rows.shape[1] <= _MOST_CHOSEN:
            return _of_indices(rows, max(counts, default=0))
    return None


def _of_map(rows: torch.Tensor) -> Chosen:
    number = torch.arange(rows.shape[1], device=rows.device)
    return _chosen("routing map", torch.where(rows, number, -1), rows.shape[1])


def _of_indices(rows: torch.Tensor, num_experts: int) -> Chosen:
    return _chosen("indices", rows.long(), num_experts)


def _chosen(api: str, indices: torch.Tensor, num_experts: int) -> Chosen:
    unknown = torch.empty((len(indices), num_experts), dtype=indices.dtype, device="meta")
    return Chosen(api, unknown, indices, is_sure=True)


# Puts hooks on the modules of a model that may route, and takes them away.


class RoutingHooks:
    """The hooks of all models that are looked at now."""

    def __init__(
        self,
        patterns: Sequence[str],
        begin: Callable[[Layer, nn.Module, object], None],
        leave: Callable[[Layer, nn.Module, object], None],
        miss: Callable[[str, str], None],
        names: ModelNames,
    ) -> None:
        """Call these, which raise nothing; `patterns` are names of modules that route.

        `miss` gets the names of modules that cannot be observed, and why.
        """
        self._patterns = tuple(patterns)
        self._begin = begin
        self._leave = leave
        self._miss = miss
        self._missed: set[str] = set()
        self._names = names
        self._handles: list[Any] = []
        self._hooked: WeakMembers[nn.Module] = WeakMembers()
        self.layers: list[Layer] = []

    def __contains__(self, root: nn.Module) -> bool:
        """Say whether the modules of this model have hooks."""
        return root in self._hooked

    def add(self, root: nn.Module) -> None:
        """Put hooks on the modules of a model, on each once."""
        wrapper = wrapper_of(root, "")
        members = wrapper.ranks if wrapper is not None else ()
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
        def enter(module: nn.Module, args: object, kwargs: object) -> None:
            self._begin(layer, module, (args, kwargs))

        return enter

    def _leaving(self, layer: Layer) -> Callable[..., None]:
        def leave(module: nn.Module, _: object, result: object) -> None:
            self._leave(layer, module, result)

        return leave


# The probe.

_MOST_EVENTS: Final = 512
"""So many choices are written down in a step at most."""
_MOST_WAITING: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says; the last two get auxiliary losses."""

    model_started: Signal[nn.Module]
    before_backward: Signal[[]]
    step_ended: Signal[[]]
    collective_recorded: Signal[int, str]
    aux_loss_used: Signal[Sequence[str]]
    aux_loss_injected: Signal[Any]
    aux_loss_doubted: Signal[bool]


class RoutingProbe(Probe):
    """Looks at the modules of each model that may route."""

    name: ClassVar[str] = "routing"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        biases: Biases,
        named: Sequence[str],
        names: ModelNames,
        *,
        is_light: bool = False,
    ) -> None:
        """Know of no model yet; `named` are patterns of modules that route, whatever their kind.

        The `biases` that choose experts are noted. If it `is_light`, losses are not looked at, and
        fewer of the first steps are.
        """
        super().__init__(recorder)
        self._moments = moments
        self._unsubscribe: Unsubscribe | None = None
        self._is_light = is_light
        self._hooks = RoutingHooks(named, self._on_enter, self._on_leave, self._miss, names)
        self._thread = Passes(biases)
        self._first: WeakMap[nn.Module, int] = WeakMap()
        self._waiting: deque[RoutingReading] = deque(maxlen=_MOST_WAITING)
        self._counters: deque[tuple[Pending, str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._num_events = 0
        self._is_doubted = False
        self._aux = AuxLosses(self._watched, self._site, self.fail, moments.aux_loss_injected)
        self._sampled_steps = SampledSteps(self._aux, is_light=is_light)

    def _install(self) -> None:
        moments = self._moments
        self._subscribe(moments.model_started, self._start)
        self._subscribe(moments.before_backward, self._write)
        self._subscribe(moments.step_ended, self._next_step)
        self._subscribe(moments.aux_loss_used, self._use_aux)

    def uninstall(self) -> None:
        """Take the hooks of the modules away, too."""
        super().uninstall()
        self._unhook()

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._write()

    # When to look

    @guarded
    def _start(self, root: nn.Module) -> None:
        self._first[root] = self.recorder.step
        self._hook(root)
        self._tell_doubt()

    @guarded
    def _use_aux(self, layers: Sequence[str]) -> None:
        self._aux.note_used(layers)

    def _tell_doubt(self) -> None:
        if self._aux.is_doubtful() != self._is_doubted:
            self._is_doubted = not self._is_doubted
            self._moments.aux_loss_doubted.emit(self._is_doubted)

    @guarded
    def _next_step(self) -> None:
        self._write()
        for fields in self._aux.take({layer.name: layer.model for layer in self._hooks.layers}):
            # The step that ended.
            self.recorder.event(AuxLoss, step=self.recorder.step - 1, **fields)
        self._num_events = 0
        for layer in self._hooks.layers:
            layer.calls.clear()
            layer.num_passes = 0
        if not self._first:
            return
        due = [root for root in self._first if self._is_due(root)]
        if not due:
            self._unhook()
        for root in due:
            if root not in self._hooks:
                self._hook(root)
        self._tell_doubt()

    def _is_due(self, root: nn.Module) -> bool:
        return self._sampled_steps.is_due(self.recorder.step, self._first[root])

    def _hook(self, root: nn.Module) -> None:
        if self._unsubscribe is None:
            self._unsubscribe = self._moments.collective_recorded.subscribe(self._on_collective)
        if not self._is_light:
            self._aux.begin()
        self._hooks.add(root)

    def _unhook(self) -> None:
        self._aux.end()
        self._hooks.remove()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    # Forward passes

    def _on_enter(self, layer: Layer, module: nn.Module, given: object) -> None:
        self._begin(layer, module, given)

    def _on_leave(self, layer: Layer, module: nn.Module, result: object) -> None:
        self._look_at(layer, result)
        self._count(layer, module)
        self._limit(layer)
        with guard(self.fail):
            # Also when the probe is off: the mode must go.
            self._thread.leave(layer, self._aux.settle)

    @guarded
    def _begin(self, layer: Layer, module: nn.Module, given: object) -> None:
        is_recompute = torch._C._current_graph_task_id() != -1
        call = layer.calls.get(is_recompute, 0)
        is_observed = module.training and self._num_events < _MOST_EVENTS
        if is_observed:
            layer.calls[is_recompute] = call + 1
        tensors = (t for t in tensors_in(given) if t.is_floating_point() and t.ndim > 1)
        outer = self._thread.open
        parent = layer.name.rpartition(".")[0]
        is_around = bool(outer) and outer[-1].layer.name == parent
        is_random = layer.is_random or (is_around and outer[-1].is_random)
        tokens, kept = next(tensors, None), versions_of(module) if is_observed else {}
        opened = Pass(layer, tokens, is_recompute, is_observed, is_random, call, kept)
        opened.module = module
        opened.ordinal, layer.num_passes = layer.num_passes, layer.num_passes + 1
        tell = (self._on_choice, self._on_draw, self._on_write, self._aux.saw_scalar)
        self._thread.enter(opened, tell, self.fail, self._aux.saw_call)
        if layer.is_named:
            self._look_at(layer, given)

    @guarded
    def _look_at(self, layer: Layer, value: object) -> None:
        opened = self._thread.innermost_of(layer)
        if opened is None or opened.number or opened.num_tokens:
            return
        if opened.is_observed and (layer.is_named or layer.is_router):
            chosen = choice_in(value, opened.given, layer.counts)
            if chosen is not None:
                self._note(opened, chosen)

    @guarded
    def _count(self, layer: Layer, module: nn.Module) -> None:
        opened = self._thread.innermost_of(layer)
        if opened is None:
            return
        for how, tensor in self._thread.counts.take() if self._thread.counts else ():
            fields = {"model": layer.model, "layer": layer.name, "site": self._site()}
            fields |= {"dtype": str(tensor.dtype).removeprefix("torch.")}
            self._counters.append((read(tensor), how, fields))
        for name, tensor in changed_since(module, opened.versions):
            site = opened.sites.get(id(tensor))
            fields = {**self._fields(opened), "name": name}
            fields["site"] = site or fields["site"]
            del fields["members"], fields["number"], fields["is_random"]
            self._counters.append((read(tensor), "", fields))

    @guarded
    def _limit(self, layer: Layer) -> None:
        opened = self._thread.innermost_of(layer)
        if opened is not None:
            for reading in opened.readings:
                reading.limit(layer.name, opened.capacity)

    def _on_draw(self) -> None:
        if self._thread.open:
            self._thread.open[-1].is_random = True

    def _on_write(self, written: object) -> None:
        opened = self._thread.open[-1] if self._thread.open else None
        if opened is not None and any(kept == id(written) for kept, _ in opened.versions.values()):
            with guard(self.fail):
                opened.sites[id(written)] = self._site()

    def _site(self) -> CallSite:
        return CallSite(frames_of(sys._getframe(1), self.recorder.main_script))

    def _on_collective(self, call: int, op: str) -> None:
        if op.startswith("all_to_all") and self._thread.open:
            self._exchange(call)
        elif op == "all_reduce" and self._thread.counts is not None:
            with guard(self.fail):
                self._thread.counts.reduced()

    @guarded
    def _exchange(self, call: int) -> None:
        opened = self._thread.innermost_routing()
        if opened is None or self._num_events >= _MOST_EVENTS:
            return
        self._num_events += 1
        self.recorder.event(
            TokensExchanged,
            model=opened.layer.model,
            layer=opened.layer.name,
            ordinal=opened.ordinal,
            is_recompute=opened.is_recompute,
            call=call,
            num_tokens=opened.num_tokens,
            num_experts=opened.num_experts,
            k=opened.k,
            capacity=opened.capacity,
        )

    def _on_choice(self, chosen: Chosen) -> None:
        if self._thread.open and self._thread.open[-1].is_observed:
            self._note(self._thread.open[-1], chosen)

    def _watched(self) -> nn.Module | None:
        # Whether a loss holds a term that was made of scores is known from a look at losses only.
        opened = self._thread.open[-1] if self._thread.open and not self._is_light else None
        is_first = opened is not None and opened.is_observed and not opened.is_recompute
        return opened.module if opened is not None and is_first else None

    @guarded
    def _note(self, opened: Pass, chosen: Chosen) -> None:
        counts = frozenset().union(*(each.layer.counts for each in self._thread.open))
        if not chosen.is_sure and chosen.scores.shape[1] not in counts:
            return
        fields = self._fields(opened)
        opened.number += 1
        self._num_events += 1
        reading = RoutingReading(chosen, opened.given, counts, fields)
        self._waiting.append(reading)
        for each in self._thread.open[-2:]:
            each.readings.append(reading)
        if not self._is_light:
            marked = mark_scores(chosen.node, Mark(opened.layer.name, len(chosen.scores)))
            self._aux.saw_scores(opened.layer.name, marked)

    def _fields(self, opened: Pass) -> dict[str, Any]:
        layer = opened.layer
        return {
            "step": self.recorder.step,
            "model": layer.model,
            "layer": layer.name,
            "members": layer.members,
            "call": opened.call,
            "number": opened.number,
            "is_recompute": opened.is_recompute,
            "is_random": opened.is_random,
            "site": self._site(),
        }

    def _write(self) -> None:
        if self._counters or self._waiting:
            self._write_waiting()

    @guarded
    def _write_waiting(self) -> None:
        while self._counters and (found := self._counters[0][0].take()) is not None:
            (content,), (_, how, values) = found, self._counters.popleft()
            if not how:
                after = "" if content is None else content.digest
                self.recorder.event(CounterWritten, after=after, **values)
            elif content is not None:
                self.recorder.event(CountsHeld, how=how, greatest=content.greatest, **values)
        while self._waiting:
            fields = self._waiting[0].take()
            if fields is None:
                return
            self._waiting.popleft()
            self.recorder.event(Routing, **fields)
