"""What an optimizer holds when it is about to step, and whom its parameters belong to."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from distdiag.events.models import MOST_NAMES
from distdiag.probes.models.modules import clean_name, own_parameters
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.wrappers import sharded_parameters, walk
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def owners_of(
    optimizers: Sequence[torch.optim.Optimizer], labels: Mapping[int, str]
) -> dict[int, tuple[str, ...]]:
    """Return the optimizers of each parameter, by its id; `labels` are their names, by theirs."""
    owners: dict[int, tuple[str, ...]] = {}
    for optimizer in optimizers:
        name = labels.get(id(optimizer), type(optimizer).__name__)
        for parameter in parameters_of(optimizer):
            known = owners.get(id(parameter), ())
            owners[id(parameter)] = known if name in known else (*known, name)
    return owners


_MOST_CHANGES: Final = 16
"""Of so many changes of a rate it is told when they were: between two looks one of epochs has no
more."""


@dataclass(slots=True)
class _Steps:
    all: int = 0
    zero: int = 0
    backwards: int = 0
    backwards_before: int = 0
    idle_samples: int = 0
    was_fed: bool = False
    rates: tuple[float, ...] = ()
    rate_changes: deque[tuple[int, tuple[float, ...]]] = field(
        default_factory=lambda: deque(maxlen=_MOST_CHANGES)
    )
    rate_history: int = 0


class StepCounts:
    """How often each optimizer has stepped, and after how many backward passes."""

    def __init__(self) -> None:
        self._steps: WeakMap[torch.optim.Optimizer, _Steps] = WeakMap()

    def count(self, optimizer: torch.optim.Optimizer, num_backwards: int) -> None:
        """Count a step that begins, after so many backward passes of the process."""
        steps = self._steps.setdefault(optimizer, _Steps())
        # Read at every step: no call for each group, and nothing of a tensor.
        groups = getattr(optimizer, "param_groups", ())
        found = [group.get("lr") for group in groups]
        rates = tuple([rate if type(rate) is float else -1.0 for rate in found])
        if rates != steps.rates:
            steps.rates = rates
            steps.rate_changes.append((steps.all, rates))
            steps.rate_history = hash((steps.rate_history, steps.all, rates))
        steps.all += 1
        steps.backwards_before, steps.backwards = steps.backwards, num_backwards

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many steps an optimizer has taken before the one that begins."""
        return self._steps[optimizer].all - 1

    def found_zeros(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step whose gradients are all zero."""
        self._steps[optimizer].zero += 1

    def sampled(self, optimizer: torch.optim.Optimizer, *, is_idle: bool) -> dict[str, Any]:
        """Count a sample of the gradients of an optimizer; return what all have shown."""
        steps = self._steps[optimizer]
        steps.idle_samples = steps.idle_samples + 1 if is_idle else 0
        steps.was_fed = steps.was_fed or not is_idle
        return {"num_idle": steps.idle_samples, "was_fed": steps.was_fed}

    def fields(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the counts before this step, as fields of an `OptimizerState`."""
        steps = self._steps[optimizer]
        return {
            "num_backwards": steps.backwards - steps.backwards_before,
            "num_steps": steps.all - 1,
            "num_zero_steps": steps.zero,
            "rate_changes": tuple(steps.rate_changes),
            "rate_history": steps.rate_history,
        }


def has_only_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether all gradients are zero, as far as that can be read without waiting."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    if not gradients or any(each.device.type != "cpu" for each in gradients):
        return False
    parts = [local_part(each) for each in gradients]
    if not all(map(is_readable, parts)) or not any(each.numel() for each in parts):
        return False
    return not any(bool(each.any()) for each in parts)


def fields_of(
    optimizer: torch.optim.Optimizer,
    optimizers: Sequence[torch.optim.Optimizer],
    roots: Sequence[nn.Module],
) -> dict[str, Any]:
    """Return those fields of an `OptimizerState` that tell of its parameters and their state."""
    held = parameters_of(optimizer)
    named = named_parameters(roots)
    foreign = [parameter for parameter in held if id(parameter) not in named]
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    members = {id(parameter) for parameter in held}
    stateful = {id(key) for key in optimizer.state if isinstance(key, torch.Tensor)}
    counts = [count_of(state["step"]) for state in states if "step" in state]
    return {
        "num_parameters": len(held),
        "num_without_gradient": sum(parameter.grad is None for parameter in held),
        "without_gradient": _names(named, {id(each) for each in held if _lacks_gradient(each)}),
        "num_gradients": sum(parameter.grad is not None for _, parameter in named.values()),
        "num_foreign": len(foreign),
        "num_stale_states": len(stateful - members - set(named)),
        "num_stateless": len(members - stateful),
        "stateless": _names(named, members - stateful),
        "replaced": _replaced(foreign, named, owners_of(optimizers, {})),
        "learning_rates": tuple(rate_of(group) for group in optimizer.param_groups),
        "least_count": min(counts, default=-1),
        "greatest_count": max(counts, default=-1),
    }


def _lacks_gradient(parameter: torch.Tensor) -> bool:
    if parameter.grad is not None or not parameter.requires_grad:
        return False
    return local_part(parameter).numel() > 0  # else another rank has the gradient of it


def forgotten(
    roots: Sequence[nn.Module],
    owners: Mapping[int, tuple[str, ...]],
    is_new: Callable[[nn.Module], bool],
) -> tuple[str, ...]:
    """Return parameters of new modules that have a gradient and no optimizer."""
    names = []
    for root in roots:
        new = [part for part in root.modules() if is_new(part)]
        inside = {id(each) for part in new for each in own_parameters(part).values()}
        for key, (name, parameter) in named_parameters([root]).items():
            if key in inside and key not in owners and parameter.grad is not None:
                names.append(name)
    return tuple(names[:MOST_NAMES])


def copy_instead(
    optimizer: torch.optim.Optimizer,
    owners: Mapping[int, tuple[str, ...]],
    roots: Sequence[nn.Module],
) -> tuple[nn.Module, tuple[str, ...]] | None:
    """Return a model that has the gradients instead of what an optimizer holds, and their names.

    It has parameters of the same names and shapes, and no optimizer holds any of them.
    """
    held = {id(each) for each in parameters_of(optimizer) if each.requires_grad}
    if not held or any(each.grad is not None for each in parameters_of(optimizer)):
        return None
    models = [(root, named_parameters([root])) for root in roots]
    wanted = [
        {(name, each.shape) for key, (name, each) in named.items() if key in held}
        for _, named in models
        if held & named.keys()
    ]
    for root, named in models:
        known = {(name, each.shape) for name, each in named.values()}
        if not owners.keys() & named.keys() and any(known >= each for each in wanted):
            names = tuple(name for name, each in named.values() if each.grad is not None)
            if names:
                return root, names[:MOST_NAMES]
    return None


def foreign_parameters(
    optimizer: torch.optim.Optimizer, roots: Sequence[nn.Module]
) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that belong to no model."""
    named = named_parameters(roots)
    return [parameter for parameter in parameters_of(optimizer) if id(parameter) not in named]


def named_parameters(roots: Sequence[nn.Module]) -> dict[int, tuple[str, torch.Tensor]]:
    """Return name and tensor of all parameters of models, by the id of the tensor."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for root in roots:
        tree = list(walk(root))
        records = sharded_parameters(tree)
        for path, module, _ in tree:
            for name, parameter in own_parameters(module).items():
                record = records.get((id(module), name))
                whole = parameter if record is None else record.sharded_param
                if whole is not None:
                    full = clean_name(f"{path}.{name}" if path else name)
                    named.setdefault(id(whole), (full, whole))
    return named


def _replaced(
    foreign: Sequence[torch.Tensor],
    named: dict[int, tuple[str, torch.Tensor]],
    owners: dict[int, tuple[str, ...]],
) -> tuple[str, ...]:
    """Return the parameters that the optimizer should hold instead of those that nobody has."""
    if not foreign or any(parameter.grad is not None for parameter in foreign):
        return ()
    names = [
        name
        for key, (name, parameter) in named.items()
        if parameter.grad is not None and key not in owners
    ]
    return tuple(names[:MOST_NAMES])


def _names(named: dict[int, tuple[str, torch.Tensor]], parameters: set[int]) -> tuple[str, ...]:
    names = [name for key, (name, _) in named.items() if key in parameters]
    return tuple(names[:MOST_NAMES])


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group, NaN where reading it would wait."""
    rate = group.get("lr", 0.0)
    # Reading a rate from the device would wait for it.
    if isinstance(rate, torch.Tensor) and not (rate.is_cpu and is_readable(rate)):
        return float("nan")
    return float(rate)


def count_of(count: Untyped) -> int:
    """Return a step counter of an optimizer's state, -1 where reading it would wait."""
    if isinstance(count, torch.Tensor):
        is_there = type(count) is torch.Tensor and count.is_cpu and is_readable(count)
        return int(count) if is_there and count.numel() == 1 else -1
    return int(count)
