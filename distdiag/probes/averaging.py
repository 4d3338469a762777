"""Over which ranks the wrapper of a model combines gradients, and what it divides their sum by."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from distdiag.probes.keepers import keeper_of, param_groups
from distdiag.probes.own_steps import OwnSteps

Averaging = tuple[tuple[int, ...], float]

UNKNOWN: Averaging = ((), 0.0)
_MOST_GROUPS: Final = 64


def averaging_of(steps: OwnSteps, optimizer: torch.optim.Optimizer) -> Averaging:
    """Return the ranks and the divisor for the models of an optimizer; 0 if it is not known."""
    roots = steps.roots_of(optimizer)
    found = {averaging_in(root) for root in roots}
    if len(found) != 1:
        return UNKNOWN
    members, divisor = found.pop()
    is_local = any(map(steps.is_local, roots))
    return members, 0.0 if is_local else divisor


def known_groups() -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each process group that this rank belongs to."""
    groups = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
    return tuple(sorted(groups)[:_MOST_GROUPS])


def averaging_in(root: nn.Module) -> Averaging:
    """Return the ranks and the divisor for one model."""
    found: set[Averaging] = set()
    for module in root.modules():
        keeper = keeper_of(module, "")
        if keeper is not None and (keeper.kind != "FSDP2" or param_groups(module)):
            found.add((keeper.ranks, _divisor(module, keeper.kind, len(keeper.ranks))))
    return found.pop() if len(found) == 1 else UNKNOWN


def _divisor(module: Any, kind: str, num_ranks: int) -> float:  # noqa: ANN401
    if isinstance(module, DistributedDataParallel):
        return 0.0 if getattr(module, "_comm_hooks", None) else float(num_ranks)
    if kind == "FSDP2":
        divisors = {_given(group, num_ranks) for group in param_groups(module)}
        return divisors.pop() if len(divisors) == 1 else 0.0
    if kind == "FSDP1":
        is_plain = getattr(module, "_comm_hook", None) is None
        is_hybrid = "HYBRID" in getattr(module.sharding_strategy, "name", "HYBRID")
        return float(num_ranks) if is_plain and not is_hybrid else 0.0
    return 0.0


def _given(group: Any, num_ranks: int) -> float:  # noqa: ANN401
    if getattr(group, "_all_reduce_hook", None) is not None:
        return 0.0
    given = getattr(group, "gradient_divide_factor", None)
    return float(num_ranks) if given is None else float(given)
