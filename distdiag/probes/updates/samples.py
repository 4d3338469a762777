"""Samples of parameters before and after a step, compared on the device that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from distdiag.probes.models.optimizer_state import count_of, rate_of
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped

MOST_SAMPLED: Final = 1 << 12
NUM_FIGURES: Final = 9
"""How many numbers `figures` gives for each tensor."""

_SMALL: Final = 0.25
"""An update below half of the spacing is lost by rounding to nearest; half of that leaves room for
what the estimate of the update does not know, such as weight decay."""


@dataclass(slots=True)
class Sampled:
    """One parameter that is about to be changed."""

    name: str
    parameter: torch.Tensor
    gradient: torch.Tensor
    group: Mapping[str, Any]
    size: int = 0

    @property
    def local(self) -> torch.Tensor:
        """The part of it that this rank holds."""
        return local_part(self.parameter).detach()


@dataclass(slots=True)
class Batch:
    """Parameters of one type, device and group of the optimizer, and their samples in a row."""

    members: list[Sampled]
    before: torch.Tensor
    gradients: torch.Tensor
    norms: list[torch.Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, ...]:
        """What is the same as long as the samples are those of the same tensors."""
        return tuple(id(each.parameter) for each in self.members)


def sampled_from(name: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> Sampled | None:
    """Return a parameter with its gradient if both can be read now."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    here, there = local_part(parameter), local_part(gradient)
    if here.shape != there.shape or not here.dtype.is_floating_point or not here.numel():
        return None
    if not is_readable(here) or not is_readable(there):
        return None
    return Sampled(name, parameter, there, group)


def batches_of(sampled: Sequence[Sampled]) -> list[Batch]:
    """Take samples of parameters and gradients before the step."""
    by_kind: dict[tuple[object, ...], list[Sampled]] = {}
    for each in sampled:
        kind = (each.local.dtype, each.local.device, each.gradient.dtype, id(each.group))
        by_kind.setdefault(kind, []).append(each)
    batches = []
    for members in by_kind.values():
        taken = [sample(each.local) for each in members]
        for each, values in zip(members, taken, strict=True):
            each.size = values.numel()
        gradients = torch.cat([sample(each.gradient) for each in members]).float()
        norms = torch._foreach_norm([each.gradient.detach() for each in members], 2)
        batches.append(Batch(members, torch.cat(taken), gradients, list(norms)))
    return batches


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements in row-major order, at most `MOST_SAMPLED`."""
    # Odd, so that it meets all columns of a matrix, whose sides mostly are powers of two.
    stride = max(1, -(-tensor.numel() // MOST_SAMPLED))
    stride = stride if stride == 1 else stride | 1
    return tensor.detach().reshape(-1)[::stride]


def figures(
    batch: Batch, state: Mapping[Any, Any], first: torch.Tensor, num_steps: int
) -> list[torch.Tensor]:
    """Compare with what the step left; return `NUM_FIGURES` numbers for each parameter.

    `first` are the samples of the first look, `num_steps` the steps of the optimizer so far. The
    numbers are the counts of `TensorUpdate` in its order, then the sums of the sizes of updates,
    weights and spacings.
    """
    after = torch.cat([sample(each.local) for each in batch.members])
    weights = batch.before.float()
    has_gradient = batch.gradients != 0
    stays = has_gradient & (after == batch.before)
    moved = has_gradient & (after != first)
    spacing = spacing_of(weights, batch.before.dtype)
    updates = torch.cat(
        [expected_update(each, state.get(each.parameter, {}), num_steps) for each in batch.members]
    ).abs()
    is_small = has_gradient & (updates > 0) & (updates < _SMALL * spacing)
    rows = torch.stack(
        [
            has_gradient,
            stays,
            moved,
            is_small,
            is_small & (after != batch.before),
            torch.where(is_small, updates / spacing, 0.0),
            torch.where(has_gradient, updates, 0.0),
            torch.where(has_gradient, weights.abs(), 0.0),
            torch.where(has_gradient, spacing, 0.0),
        ]
    )
    sums, first_column = [], 0
    for each in batch.members:
        part = rows.narrow(1, first_column, each.size)
        sums.append(part.sum(1, dtype=torch.float64))
        first_column += each.size
    return sums


def spacing_of(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance from each number to the next larger one of a type, zero for zero."""
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(weights)
    spacing = torch.ldexp(torch.full_like(weights, info.eps), exponents - 1)
    spacing = spacing.clamp(min=info.smallest_normal * info.eps)
    return torch.where(weights == 0, 0.0, spacing)


def expected_update(one: Sampled, state: Untyped, num_steps: int) -> torch.Tensor:
    """Return what the step should have subtracted, by the state that it left; NaN if unknown."""
    rate = rate_of(one.group)
    kept = {
        key: sample(local_part(value)).float()
        for key, value in (state.items() if isinstance(state, Mapping) else ())
        if _is_beside(value, one.local)
    }
    if {"exp_avg", "exp_avg_sq"} <= kept.keys() and "betas" in one.group:
        count = count_of(state.get("step", -1))
        return rate * _adam(one.group, kept, count if count > 0 else num_steps)
    if kept.keys() == {"exp_avg"}:
        return torch.full_like(kept["exp_avg"], rate)  # the sign of an average, as Lion has it
    if "momentum_buffer" in kept:
        return rate * kept["momentum_buffer"]
    if not kept and "momentum" in one.group:
        return rate * sample(one.gradient).float()
    return torch.full((one.size,), math.nan, device=one.local.device)


def _is_beside(value: object, parameter: torch.Tensor) -> bool:
    """Say whether a value of the state can be read, element by element, beside the parameter."""
    if not isinstance(value, torch.Tensor):
        return False
    here = local_part(value)
    is_alike = here.shape == parameter.shape and here.device == parameter.device
    return is_alike and here.dtype.is_floating_point and is_readable(here)


def _adam(
    group: Mapping[str, Any], kept: Mapping[str, torch.Tensor], num_steps: int
) -> torch.Tensor:
    first, second = (float(each) for each in group["betas"][:2])
    corrected = kept["exp_avg"] / (1 - first**num_steps)
    size = (kept["exp_avg_sq"] / (1 - second**num_steps)).sqrt()
    return corrected / (size + float(group.get("eps", 0.0)))


# What else keeps the precision that a narrow parameter lacks.

_COMPENSATION: Final = ("comp", "kahan", "residual", "shift", "error", "lo_bits", "master", "fp32")
"""Parts of the names under which optimizers keep what rounding cut off, or wider copies
(optimi, pytorch_optimizer, torchao, apex, TransformerEngine)."""


def keeps_precision(parameter: torch.Tensor, state: Untyped) -> bool:
    """Say whether the state of a narrow parameter, or the parameter, has the rest of its bits."""
    if not isinstance(state, Mapping):
        return False
    if any(name in str(key).lower() for key in state for name in _COMPENSATION):
        return True
    beside = [value for key, value in vars(parameter).items() if key != "grad"]
    known = ("exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")
    others = [value for key, value in state.items() if key not in known]
    return any(is_wider_copy(value, parameter) for value in [*beside, *others])


def is_wider_copy(value: object, parameter: torch.Tensor) -> bool:
    """Say whether this is a tensor of the same size and a wider floating-point type."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    is_wider = value.element_size() > parameter.element_size()
    return is_wider and value.numel() == parameter.numel() > 1
