"""The range of the values of tensors, which may still be computed, and how near the limit it is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from distdiag.events.numerics import NearOverflow, Stage
from distdiag.probes.gradients.weighted_sums import PendingValues
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.bytes import is_readable
from distdiag.record.recorder import Recorder

_READ: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW: Final = (torch.float16,)
"""Of bfloat16 and wider types the largest number is 3e38: what comes near it is no activation."""
_NEAR: Final = 0.5
"""One more doubling overflows."""
_MOST_TOLD: Final = 16


@dataclass(slots=True)
class Reading:
    """One tensor that is read: where, and what was found.

    `consumers` are names and classes of the modules that were given this very tensor; `is_output`:
    the model has returned it. `parameter` refers to what is named only if need be.
    """

    stage: Stage
    model: str
    module: str
    kind: str
    what: str
    number: int = 0
    forward: int = 0
    is_exact: bool = True
    is_output: bool = False
    consumers: list[tuple[str, str]] = field(default_factory=list)
    parameter: weakref.ref[torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    low: float = 0.0
    high: float = 0.0

    @property
    def place(self) -> tuple[str, str, str]:
        """Return what tells it from the other readings of a pass."""
        return (self.model, self.module, self.what)

    @property
    def phrase(self) -> str:
        """Return what was read, in words."""
        return f"the output of {self.module}" if self.what == "its output" else self.what

    @property
    def value(self) -> str:
        """Return ``nan``, ``inf``, ``-inf`` (nothing worse), or nothing if all is finite."""
        if math.isnan(self.low) or math.isnan(self.high):
            return "nan"
        if math.inf in (self.low, self.high):
            return "inf"
        return "-inf" if self.low == -math.inf else ""

    @property
    def is_strong(self) -> bool:
        """Whether it is not finite, in a way that masks and the scores of what is left out are."""
        value = self.value
        is_mask_like = self.stage in ("input", "forward", "buffer")
        return value in ("nan", "inf") or (value == "-inf" and not is_mask_like)

    @property
    def largest(self) -> float:
        """Return the greatest absolute value."""
        return max(abs(self.low), abs(self.high))


def range_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the least and the greatest value of a tensor, None if it has none that can be read.

    NaN makes both NaN. Within the guard: the tensors that are returned are on its device.
    """
    local = local_part(tensor).detach()
    if local.dtype not in _READ or not is_readable(local) or not local.numel():
        return None
    return list(torch.aminmax(local))


@dataclass(slots=True)
class Batch:
    """Many parameters, or their gradients, that are read at once; they get readings if need be."""

    stage: Stage
    parameters: list[weakref.ref[torch.Tensor]]
    number: int = 0
    forward: int = 0

    def readings(self, values: Sequence[float], *, are_all_wanted: bool) -> Iterator[Reading]:
        """Yield those whose values are not finite, or all."""
        for parameter, value in zip(self.parameters, values, strict=True):
            if are_all_wanted or not math.isfinite(value):
                made = Reading(self.stage, "", "", "", "", self.number, self.forward)
                made.parameter, made.low, made.high = parameter, value, value
                yield made


def batches_of(
    stage: Stage, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[Batch | Reading, list[torch.Tensor]]]:
    """Yield what reads tensors that belong to parameters, with few kernels on a GPU.

    There the maximum norm takes the place of the least and the greatest value.
    """
    on_gpu: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, tensor in zip(parameters, tensors, strict=True):
        local = local_part(tensor).detach()
        if local.device.type == "cuda":
            if local.dtype in _READ and is_readable(local) and local.numel():
                on_gpu.setdefault((local.device, local.dtype), []).append((parameter, local))
        elif (found := range_of(tensor)) is not None:
            yield parameter_reading(stage, parameter), found
    for held in on_gpu.values():
        norms = torch._foreach_norm([local for _, local in held], math.inf)
        batch = Batch(stage, [weakref.ref(parameter) for parameter, _ in held])
        yield batch, [torch.stack(norms)]


class PendingRanges:
    """Readings whose values may not be there yet."""

    def __init__(self, readings: list[tuple[Reading | Batch, list[torch.Tensor]]]) -> None:
        """Begin to bring the values to the host."""
        self._readings = [(reading, len(tensors)) for reading, tensors in readings]
        self._values = PendingValues([each for _, tensors in readings for each in tensors])

    def take(self, *, are_all_wanted: bool = True) -> list[Reading] | None:
        """Return the readings with their values, None if they are not there yet; never wait.

        Of batches those of finite values are left out unless all are wanted.
        """
        found = self._values.take()
        if found is None:
            return None
        values = iter(found)
        readings: list[Reading] = []
        for reading, number in self._readings:
            if isinstance(reading, Batch):
                readings += reading.readings(next(values), are_all_wanted=are_all_wanted)
                continue
            bounds = [next(values)[0] for _ in range(number)]
            reading.low, reading.high = bounds[0], bounds[-1]
            readings.append(reading)
        return readings


def parameter_reading(stage: Stage, parameter: torch.Tensor) -> Reading:
    """Return a reading of a parameter that gets its name when it is needed."""
    return Reading(stage, "", "", "", "", parameter=weakref.ref(parameter))


class NearLimits:
    """Writes down each module whose output comes near the limit, at the first time."""

    def __init__(self, recorder: Recorder) -> None:
        """Know of no module yet."""
        self._recorder = recorder
        self._first: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._told: set[tuple[str, str, str]] = set()

    def judge(self, reading: Reading, step: int) -> None:
        """Take in what was read of one activation."""
        if reading.stage != "forward" or reading.dtype not in _NARROW or reading.value:
            return
        earlier, earlier_step = self._first.setdefault(reading.place, (reading.largest, step))
        limit = torch.finfo(reading.dtype).max
        is_told = reading.place in self._told or len(self._told) >= _MOST_TOLD
        # What is as large as can be was filled in, as masks are.
        if not _NEAR * limit < reading.largest < limit or is_told:
            return
        self._told.add(reading.place)
        self._recorder.event(
            NearOverflow,
            step=step,
            model=reading.model,
            module=reading.module,
            module_class=reading.kind,
            dtype=str(reading.dtype).removeprefix("torch."),
            largest=reading.largest,
            limit=limit,
            earlier=earlier,
            earlier_step=earlier_step,
        )
