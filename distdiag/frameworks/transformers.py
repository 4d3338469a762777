"""Tensor-parallel plans of models that transformers has loaded and sharded."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import NamedFault, PatternMatches, PlanFault, PlanSource
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.attention_heads import cut_heads
from distdiag.probes.models.plan_patterns import PlanProbe, outcome

MODULE: Final = "transformers.modeling_utils"

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


class TransformersPlans(PlanProbe):
    """Looks at a model that `from_pretrained` returns, if it was sharded over a mesh."""

    name: ClassVar[str] = "transformers-plans"

    def _install(self) -> None:
        kind = getattr(sys.modules[MODULE], "PreTrainedModel", None)
        self._patches.wrap(kind, "from_pretrained", self._call_after(self._look))

    @guarded
    def _look(self, result: object, /, *_: object, **__: object) -> None:
        model = result[0] if isinstance(result, tuple) and result else result
        size = getattr(model, "_tp_size", None)
        plan = getattr(model, "_tp_plan", None)
        if not isinstance(size, int) or size < 2 or not isinstance(plan, Mapping):
            return
        if isinstance(model, nn.Module) and getattr(model, "_device_mesh", None) is not None:
            site = CallSite(frames_of(sys._getframe(3), self.recorder.main_script))
            outcomes = _outcomes(model, plan, size)
            self._tell(PlanSource.TRANSFORMERS, type(model).__name__, outcomes, site)


def _outcomes(model: nn.Module, plan: Mapping[str, object], size: int) -> Iterator[PatternMatches]:
    modules = {name: module for name, module in model.named_modules() if name}
    names = [*modules, *(name for name, _ in model.named_parameters())]
    by_form: dict[str, list[str]] = {}
    for name in names:
        # Numbers of layers are written as stars, in older versions all numbers are.
        for form in {_NUMBER.sub("*", name), re.sub(r"\d+", "*", name), name}:
            by_form.setdefault(form, []).append(name)
    for pattern, style in plan.items():
        found = by_form.get(pattern, [])
        faults = []
        for name in found if style == "colwise" else ():
            parent = modules.get(name.rpartition(".")[0])
            text = cut_heads(parent, modules.get(name), size) if parent is not None else ""
            faults += [NamedFault(PlanFault.UNEVEN, name, text)] if text else []
        yield outcome(pattern, str(style), found, names, faults)
