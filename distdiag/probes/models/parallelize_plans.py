"""Calls of `parallelize_module`: when a model begins anew, and what the plans match."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import ClassVar, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor.parallel import api

from distdiag.events.base import CallSite
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanSource
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.attention_heads import cut_heads
from distdiag.probes.models.modules import own_parameters
from distdiag.probes.models.plan_patterns import PlanProbe, outcome
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_SOURCE: Final = PlanSource.PARALLELIZE_MODULE
_MOST_WATCHED: Final = 20_000


class _Match(NamedTuple):
    path: str
    parent: nn.Module
    module: nn.Module


class _Resolved(NamedTuple):
    """A pattern with the modules that it matches."""

    pattern: str
    wanted: str
    matches: list[_Match]


class _Sharded(NamedTuple):
    """A parameter that a pattern has sharded, with the shape of the whole."""

    module: weakref.ref[nn.Module]
    name: str
    path: str
    shape: torch.Size
    pattern: str
    wanted: str
    model: str
    site: CallSite


class ParallelMoments(Probe):
    """Tells whoever looks at models that `parallelize_module` changes one, and has changed it."""

    name: ClassVar[str] = "parallel-moments"

    def __init__(
        self,
        recorder: Recorder,
        parallelizing: Signal[nn.Module],
        wrapped: Signal[Sequence[nn.Module]],
    ) -> None:
        super().__init__(recorder)
        self._parallelizing = parallelizing
        self._wrapped = wrapped

    def _install(self) -> None:
        self._patches.wrap_everywhere(api, "parallelize_module", self._call_before(self._announce))
        self._patches.wrap_everywhere(api, "parallelize_module", self._call_after(self._tell))

    def _announce(self, module: nn.Module, *_: object, **__: object) -> None:
        self._parallelizing.emit(module)

    def _tell(self, _: object, module: nn.Module, *__: object, **___: object) -> None:
        self._wrapped.emit((module,))


# Plans that are given to it.


class ParallelizePlans(PlanProbe):
    """Resolves each plan as torch does, before torch applies it."""

    name: ClassVar[str] = "parallelize-plans"

    def __init__(self, recorder: Recorder, step_ended: Signal[[]]) -> None:
        super().__init__(recorder)
        self._step_ended = step_ended
        self._is_inside = False
        self._sharded: list[_Sharded] = []

    def _install(self) -> None:
        self._patches.wrap_everywhere(api, "parallelize_module", self._resolving)
        self._subscribe(self._step_ended, self._after_step)

    def _resolving(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def parallelize_module(
            module: Untyped,
            device_mesh: Untyped = None,
            parallelize_plan: Untyped = None,
            *args: Untyped,
            **kwargs: object,
        ) -> object:
            given = (module, device_mesh, parallelize_plan)
            # It calls itself for the parts of a model.
            if self._is_inside or self.is_off or torch.compiler.is_compiling():
                return original(*given, *args, **kwargs)
            self._is_inside = True
            try:
                site = self._site(sys._getframe(1))
                resolved = self._before(*given, site)
                result = original(*given, *args, **kwargs)
                if resolved and site is not None:
                    self._after(module, resolved, site)
                return result
            finally:
                self._is_inside = False

        return parallelize_module

    @guarded
    def _site(self, frame: Untyped) -> CallSite:
        return CallSite(frames_of(frame, self.recorder.main_script))

    @guarded
    def _before(
        self,
        module: object,
        mesh: object,
        plan: object,
        site: CallSite | None,
    ) -> list[_Resolved]:
        if site is None or not isinstance(plan, Mapping) or not isinstance(module, nn.Module):
            return []
        names = [name for name, _ in module.named_modules() if name]
        resolved, outcomes = [], []
        for pattern, style in plan.items():
            found = _Resolved(pattern, type(style).__name__, _resolve(module, pattern))
            resolved.append(found)
            paths = [match.path for match in found.matches]
            faults = [
                NamedFault(PlanFault.UNEVEN, match.path, text)
                for match in found.matches
                if (text := _cut(match, style, mesh))
            ]
            outcomes.append(outcome(pattern, found.wanted, paths, names, faults))
        self._tell(_SOURCE, type(module).__name__, outcomes, site)
        return resolved

    @guarded
    def _after(self, root: nn.Module, resolved: list[_Resolved], site: CallSite) -> None:
        """Keep in mind what is sharded now."""
        for pattern, wanted, matches in resolved:
            for path, _, module in matches:
                for name, parameter in own_parameters(module).items():
                    if len(self._sharded) < _MOST_WATCHED and _is_split(parameter):
                        full = f"{path}.{name}" if path else name
                        shape, model = parameter.shape, type(root).__name__  # type: ignore[union-attr]
                        self._sharded.append(
                            _Sharded(
                                weakref.ref(module), name, full, shape, pattern, wanted, model, site
                            )
                        )

    @guarded
    def _after_step(self) -> None:
        """Look once whether what was sharded has been replaced by the whole."""
        watched, self._sharded = self._sharded, []
        for each in watched:
            module = each.module()
            now = None if module is None else own_parameters(module).get(each.name)
            # A part on purpose has another shape.
            if now is None or is_dtensor(now) or now.shape != each.shape:
                continue
            text = "but after the first step there is a plain tensor that holds the whole"
            fault = NamedFault(PlanFault.UNLIKE, each.path, text)
            seen = PatternMatches(each.pattern, each.wanted, 1, (each.path,), "", (fault,))
            self._tell(_SOURCE, each.model, [seen], each.site)


def _resolve(module: nn.Module, pattern: str) -> list[_Match]:
    """Return what a pattern matches: token by token, among the children of what matched before."""
    found = [_Match("", module, module)]
    for token in pattern.split(".") if pattern else ():
        found = [
            _Match(f"{path}.{name}" if path else name, parent, child)
            for path, _, parent in found
            for name, child in parent.named_children()
            if fnmatch(name, token)
        ]
    return found


def _is_split(parameter: object) -> bool:
    if not is_dtensor(parameter):
        return False
    return parameter._local_tensor.shape != parameter.shape  # type: ignore[attr-defined, no-any-return]


def _cut(match: _Match, style: Untyped, mesh: Untyped) -> str:
    """Say which heads the style cuts, if the program gets the parts as plain tensors."""
    is_colwise = type(style).__name__ == "ColwiseParallel"
    if mesh is None or not is_colwise or not getattr(style, "use_local_output", False):
        return ""
    layouts = getattr(style, "output_layouts", ())
    if not layouts or not all(layout.is_shard(-1) for layout in layouts):
        return ""
    return cut_heads(match.parent, match.module, mesh.size())
