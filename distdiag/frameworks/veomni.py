"""Parallel plans of VeOmni: what they match, and whether it is split afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanSource
from distdiag.probes.base import AnyCallable, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.plan_patterns import PlanProbe, outcome
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.untyped import Untyped

MODULE: Final = "veomni.distributed.parallel_plan"

_AXIS_OF_PLAN: Final = re.compile(r"_?(\w+)_plan")

Shapes = Mapping[str, tuple[int, ...]]


class _Entry(NamedTuple):
    """A pattern of a plan for an axis that the job has, and the dimension that it splits."""

    axis: str
    size: int
    pattern: str
    dim: int

    @property
    def wanted(self) -> str:
        return f"Shard({self.dim}) over {self.axis}"

    def fits(self, name: str) -> bool:
        text = re.escape(self.pattern).replace(r"\*", ".*")
        return re.fullmatch(text, name) is not None


class VeOmniPlans(PlanProbe):
    """Looks at the names and shapes of parameters before and after a plan is applied."""

    name: ClassVar[str] = "veomni-plans"

    def _install(self) -> None:
        kind = getattr(sys.modules[MODULE], "ParallelPlan", None)
        self._patches.wrap(kind, "apply", self._watching)

    def _watching(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def apply(self_: Untyped, model: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            seen = self._before(self_, model, [*args, *kwargs.values()], sys._getframe(1))
            is_done = False
            try:
                result = original(self_, model, *args, **kwargs)
                is_done = True
                return result
            finally:
                if seen is not None:
                    self._after(model, *seen, is_done=is_done)

        return apply

    @guarded
    def _before(
        self, plan: object, model: nn.Module, meshes: list[Any], frame: FrameType
    ) -> tuple[list[_Entry], Shapes, CallSite]:
        site = CallSite(frames_of(frame, self.recorder.main_script))
        return list(_entries(plan, meshes)), _shapes(model), site

    @guarded
    def _after(
        self,
        model: nn.Module,
        entries: list[_Entry],
        before: Shapes,
        site: CallSite,
        *,
        is_done: bool,
    ) -> None:
        outcomes = _outcomes(entries, before, _shapes(model) if is_done else {})
        self._tell(PlanSource.VEOMNI, type(model).__name__, outcomes, site)


def _shapes(model: nn.Module) -> Shapes:
    """Return the shapes of this rank's parts."""
    return {name: tuple(local_part(each).shape) for name, each in model.named_parameters()}


def _entries(plan: object, meshes: list[Any]) -> Iterator[_Entry]:
    """Yield the patterns for axes that have more than one rank."""
    for axis, patterns in _plans(plan):
        size = next((size for mesh in meshes if (size := _size(mesh, axis))), 0)
        for pattern, placement in patterns.items() if size > 1 else ():
            dim = getattr(placement, "dim", None)
            if isinstance(dim, int):
                yield _Entry(axis, size, pattern, dim)


def _plans(plan: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dicts of a plan with their axes: `ep_plan`, or one for each name in a dict."""
    for attribute, value in vars(plan).items():
        found = _AXIS_OF_PLAN.fullmatch(attribute)
        if found is None or not isinstance(value, Mapping):
            continue
        if any(isinstance(inner, Mapping) for inner in value.values()):
            yield from ((axis, inner) for axis, inner in value.items() if inner)
        else:
            yield found[1], value


def _size(mesh: Untyped, axis: str) -> int:
    """Return how many ranks an axis has, 0 if that is not known."""
    if isinstance(mesh, Mapping):
        return _size(mesh.get(axis), axis)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.mesh.shape[names.index(axis)]) if axis in names else 0


def _outcomes(entries: list[_Entry], before: Shapes, after: Shapes) -> list[PatternMatches]:
    taken: dict[str, _Entry] = {}
    outcomes = []
    for entry in entries:
        found = [name for name in before if entry.fits(name)]
        faults = []
        for name in found:
            first = taken.setdefault(name, entry)
            if first is not entry:
                faults += _clash(name, entry, first)
            else:
                faults += _fault(name, entry, before[name], after.get(name))
        outcomes.append(outcome(entry.pattern, entry.wanted, found, before, faults))
    return outcomes


def _clash(name: str, entry: _Entry, first: _Entry) -> list[NamedFault]:
    if (first.axis, first.dim) == (entry.axis, entry.dim):
        return []
    text = f'but "{first.pattern}" comes first and says {first.wanted}'
    return [NamedFault(PlanFault.CLASH, name, text)]


def _fault(
    name: str, entry: _Entry, before: tuple[int, ...], after: tuple[int, ...] | None
) -> list[NamedFault]:
    if not -len(before) <= entry.dim < len(before):
        return []
    length = before[entry.dim]
    if length % entry.size:
        text = f"{length} is no multiple of {entry.axis}={entry.size}"
        return [NamedFault(PlanFault.UNEVEN, name, text)]
    if after == before and length:
        text = f"but its shape {list(before)} is the same as before"
        return [NamedFault(PlanFault.UNLIKE, name, text)]
    return []
