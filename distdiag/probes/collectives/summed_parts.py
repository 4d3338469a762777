"""Writes down what modules add up over ranks in a forward pass, and which weights they have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import PartsSummed
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.collectives.operators import flatten
from distdiag.probes.collectives.used_groups import ranks_of
from distdiag.probes.guard import guarded, guarded_if
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Pending, contents
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_MOST_SUMS: Final = 8
"""So many sums of a step are read."""
_MOST_WEIGHTS: Final = 8
"""A module with more matrices is not one layer, whose sum would be what they make."""
_FEWEST_DIMS: Final = 2
"""Counts, losses and statistics have fewer, and so have biases and norms, which may begin alike."""
_CALL: Final = nn.Module._call_impl.__code__


class _Reading(NamedTuple):
    fields: dict[str, Any]
    names: tuple[str, ...]
    pending: Pending


class SummedParts(Probe):
    """Looks at the first sums of a forward pass, at the first steps and others that are due."""

    name: ClassVar[str] = "summed-parts"

    def __init__(
        self,
        recorder: Recorder,
        shared: Signal[Any, Any, str],
        step_ended: Signal[[]],
        models: Callable[[], Sequence[nn.Module]],
        name_of: Callable[[nn.Module], str],
    ) -> None:
        """Know of no sum yet; `models` returns those that there are, `name_of` their names."""
        super().__init__(recorder)
        self._shared = shared
        self._step_ended = step_ended
        self._models = models
        self._name_of = name_of
        self._place = (-1, 0)
        self._num_sums = 0
        self._waiting: list[_Reading] = []

    def _install(self) -> None:
        self._subscribe(self._shared, self._before_sum)
        self._subscribe(self._step_ended, self.flush)

    def _before_sum(self, given: object, group: object, reduce_op: str) -> None:
        recorder = self.recorder
        is_forward = not recorder.here.context.backward_depth
        if reduce_op == "SUM" and is_forward and is_due(recorder.step):
            self._look(given, group, sys._getframe(1))

    @guarded
    def _look(self, given: object, group: object, frame: FrameType) -> None:
        recorder = self.recorder
        if self._place != (place := (recorder.step, recorder.num_backwards)):
            self._place, self._num_sums = place, 0
        tensors = flatten(given)
        if self._num_sums >= _MOST_SUMS or len(tensors) != 1 or not _is_matrix(tensors[0]):
            return
        layer = next(filter(_is_layer, _running(frame)), None)
        name = "" if layer is None else self._full_name(layer)
        if layer is None or not name:
            return
        weights = {n: p for n, p in layer.named_parameters() if _is_matrix(p)}
        fields = {
            "module": name,
            "number": self._num_sums,
            "step": recorder.step,
            "members": ranks_of(group),
            "site": CallSite(frames_of(frame, recorder.main_script)),
        }
        self._num_sums += 1
        pending = contents([tensors[0], *weights.values()])
        pending.guard()  # the sum is about to be written over what is read
        inside = name.partition("/")[2]
        names = tuple(f"{inside}.{each}".lstrip(".") for each in weights)
        self._waiting.append(_Reading(fields, names, pending))

    def _full_name(self, layer: nn.Module) -> str:
        """Return the name of a model and, after a slash, of the module in it; else nothing."""
        for root in self._models():
            for name, module in root.named_modules():
                if module is layer:
                    return f"{self._name_of(root)}/{clean_name(name)}"
        return ""

    @guarded_if("_waiting")
    def flush(self) -> None:
        """Write down what has been read by now."""
        while self._waiting and (found := self._waiting[0].pending.take()) is not None:
            fields, names, _ = self._waiting.pop(0)
            if any(each is None or each.zero_share == 1 for each in found):
                continue  # what is zero is the same everywhere
            total, *weights = (each.digest for each in found if each is not None)
            self.recorder.event(
                PartsSummed, digest=total, weights=tuple(zip(names, weights, strict=True)), **fields
            )


def _running(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules whose forward passes are under way, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _is_layer(module: nn.Module) -> bool:
    number = sum(map(_is_matrix, module.parameters()))
    return module.training and 0 < number <= _MOST_WEIGHTS


def _is_matrix(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() >= _FEWEST_DIMS
        and tensor.is_floating_point()
        and is_readable(tensor)
    )
