"""Writes down how tokens are routed to experts, at the first steps of a model and every hundredth.

Hooks of the modules that may route are there only while a step is looked at; within their forward
passes a mode of torch's functions sees which calls choose.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.event import CallSite
from distdiag.probes.aux_watch import AuxWatch
from distdiag.probes.base import Probe
from distdiag.probes.by_identity import WeakMap, WeakMembers
from distdiag.probes.keepers import keeper_of, unwrapped
from distdiag.probes.module_hook import ModuleHook
from distdiag.probes.own_steps import EVERY
from distdiag.probes.router_modules import expert_counts, is_meant_random, routing_modules
from distdiag.probes.routing_counters import changed_since, read, versions_of
from distdiag.probes.routing_mode import Chosen, RoutingMode
from distdiag.probes.routing_pass import Layer, Pass, Passes
from distdiag.probes.routing_reading import RoutingReading
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.score_marks import Mark, mark_scores
from distdiag.probes.stack import frames_of
from distdiag.probes.tensor_content import Pending
from distdiag.recorder import Recorder
from distdiag.routing_event import AuxLoss, CounterWritten, Routing

_FIRST_STEPS: Final = 4
_MOST_EVENTS: Final = 512
"""So many choices are written down in a step at most."""
_MOST_WAITING: Final = 4096


class RoutingWatch(Probe):
    """Looks at the modules of each model that may route."""

    name: ClassVar[str] = "routing"

    def __init__(self, recorder: Recorder) -> None:
        """Know of no model yet."""
        super().__init__(recorder)
        self._thread = Passes()
        self._first: WeakMap[nn.Module, int] = WeakMap()
        self._names: WeakMap[nn.Module, str] = WeakMap()
        self._num_names: dict[str, int] = {}
        self._layers: list[Layer] = []
        self._handles: list[Any] = []
        self._hooked: WeakMembers[nn.Module] = WeakMembers()
        self._waiting: deque[RoutingReading] = deque(maxlen=_MOST_WAITING)
        self._counters: deque[tuple[Pending, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._num_events = 0
        self._aux = AuxWatch(self._watched, self._site, self.fail)

    def _install(self) -> None:
        self.recorder.on_start.append(self._on_start)
        self.recorder.on_backward.append(self._on_moment)
        self.recorder.on_step.append(self._on_step)
        self.recorder.on_balanced.append(self._aux.is_balanced)

    def uninstall(self) -> None:
        """Take the hooks of the modules away, too."""
        super().uninstall()
        self._unhook()

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._guard(self._write)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        if self.is_off:
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)

    # When to look

    def _on_start(self, root: nn.Module) -> None:
        self._guard(self._start, root)

    def _start(self, root: nn.Module) -> None:
        self._first[root] = self.recorder.step
        self._hook(root)

    def _on_moment(self) -> None:
        self._guard(self._write)

    def _on_step(self) -> None:
        self._guard(self._next_step)

    def _next_step(self) -> None:
        self._write()
        for fields in self._aux.take({layer.name: layer.model for layer in self._layers}):
            # The step that ended.
            self.recorder.event(AuxLoss, step=self.recorder.step - 1, **fields)
        self._num_events = 0
        for layer in self._layers:
            layer.calls.clear()
        if not self._first:
            return
        due = [root for root in self._first if self._is_due(root)]
        if not due:
            self._unhook()
        for root in due:
            if root not in self._hooked:
                self._hook(root)

    def _is_due(self, root: nn.Module) -> bool:
        step = self.recorder.step
        return step < self._first[root] + _FIRST_STEPS or step % EVERY == 0

    def _hook(self, root: nn.Module) -> None:
        keeper = keeper_of(root, "")
        members = keeper.ranks if keeper is not None else ()
        self._hooked.add(root)
        self._aux.begin()
        known = {number for number, _ in self._handles}
        for name, module in routing_modules(root):
            if id(module) in known:
                continue
            layer = Layer(
                self._name(root),
                name,
                members,
                expert_counts(module),
                is_meant_random(module),
            )
            self._layers.append(layer)
            before, after = ModuleHook(self._entering(layer)), ModuleHook(self._leaving(layer))
            handles = (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            )
            self._handles.extend((id(module), handle) for handle in handles)

    def _unhook(self) -> None:
        self._aux.end()
        while self._handles:
            self._handles.pop()[1].remove()
        self._layers.clear()
        self._hooked.clear()

    def _name(self, root: nn.Module) -> str:
        name = self._names.get(root)
        if name is None:
            kind = type(unwrapped(root)).__name__.removeprefix("FSDP")
            number = self._num_names[kind] = self._num_names.get(kind, 0) + 1
            name = self._names[root] = kind if number == 1 else f"{kind}#{number}"
        return name

    # Forward passes

    def _entering(self, layer: Layer) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            self._guard(self._begin, layer, module, (args, kwargs))

        return enter

    def _leaving(self, layer: Layer) -> Callable[..., None]:
        def leave(module: nn.Module, *_: Any) -> None:  # noqa: ANN401
            self._guard(self._count, layer, module)
            try:
                self._end(layer)  # also when the probe is off: the mode must go
            except Exception as error:  # noqa: BLE001 (our part must not break the user's)
                self.fail(error)

        return leave

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
        given, kept = next(tensors, None), versions_of(module) if is_observed else {}
        outer.append(Pass(layer, given, is_recompute, is_observed, is_random, call, kept))
        outer[-1].module = module
        if self._thread.mode is None:
            tell = (self._on_choice, self._on_draw, self._on_write, self._aux.saw_scalar)
            self._thread.mode = RoutingMode(*tell)
            self._thread.mode.__enter__()  # type: ignore[no-untyped-call]

    def _count(self, layer: Layer, module: nn.Module) -> None:
        opened = self._thread.open[-1] if self._thread.open else None
        if opened is None or opened.layer is not layer:
            return
        for name, tensor in changed_since(module, opened.versions):
            site = opened.sites.get(id(tensor))
            fields = {**self._fields(opened), "name": name}
            fields["site"] = site or fields["site"]
            del fields["members"], fields["number"], fields["is_random"]
            self._counters.append((read(tensor), fields))

    def _end(self, layer: Layer) -> None:
        thread = self._thread
        if not any(each.layer is layer for each in thread.open):
            return
        while thread.open and thread.open.pop().layer is not layer:
            pass
        if not thread.open and thread.mode is not None:
            self._guard(self._aux.settle)
            mode, thread.mode = thread.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _on_draw(self) -> None:
        if self._thread.open:
            self._thread.open[-1].is_random = True

    def _on_write(self, written: object) -> None:
        opened = self._thread.open[-1] if self._thread.open else None
        if opened is not None and any(kept == id(written) for kept, _ in opened.versions.values()):
            self._guard(opened.sites.update, {id(written): self._site()})

    def _site(self) -> CallSite:
        return CallSite(frames_of(sys._getframe(1), self.recorder.main_script))

    def _on_choice(self, chosen: Chosen) -> None:
        if self._thread.open and self._thread.open[-1].is_observed:
            self._guard(self._note, self._thread.open[-1], chosen)

    def _watched(self) -> nn.Module | None:
        opened = self._thread.open[-1] if self._thread.open else None
        is_first = opened is not None and opened.is_observed and not opened.is_recompute
        return opened.module if opened is not None and is_first else None

    def _note(self, opened: Pass, chosen: Chosen) -> None:
        counts = frozenset().union(*(each.layer.counts for each in self._thread.open))
        if not chosen.is_sure and chosen.scores.shape[1] not in counts:
            return
        fields = self._fields(opened)
        opened.number += 1
        self._num_events += 1
        self._waiting.append(RoutingReading(chosen, opened.given, counts, fields))
        mark_scores(chosen.node, Mark(opened.layer.name, len(chosen.scores)))
        self._aux.saw_scores(opened.layer.name, chosen.node)

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
        while self._counters and (found := self._counters[0][0].take()) is not None:
            _, values = self._counters.popleft()
            after = "" if found[0] is None else found[0].digest
            self.recorder.event(CounterWritten, after=after, **values)
        while self._waiting:
            fields = self._waiting[0].take()
            if fields is None:
                return
            self._waiting.popleft()
            self.recorder.event(Routing, **fields)
