"""Stages of a pipeline, told from copies of one model by the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from distdiag.model_event import Basis, Content, TensorPlan

WAYS_OF_DDP: Final = (Basis.UNSYNCED, Basis.BYPASSED)

Plans = tuple[TensorPlan, ...]
Seen = Mapping[int, tuple[TensorPlan, Content]]


def told_apart(
    basis: Basis, names: Mapping[str, Seen], plans: Mapping[int, Plans]
) -> dict[Basis, dict[str, Seen]]:
    """Return the tensors that all these ranks have, by what tells that they hold the same."""
    whole = {name: seen for name, seen in names.items() if _is_whole(seen, len(plans))}
    told = {plan.basis for seen in whole.values() for plan, _ in seen.values()}
    # What any of the ranks knows of how DDP was used holds for all of them.
    basis = next((each for each in WAYS_OF_DDP if each in told), basis)
    if basis is not Basis.MARKED or not stages_in(plans):
        return {basis: whole}
    # The layers of stages have the same names, and are not the same.
    shared = {name: seen for name, seen in whole.items() if is_shared(seen)}
    return {basis: shared, Basis.WORLD: {n: whole[n] for n in whole if n not in shared}}


def stages_in(plans: Mapping[int, Plans]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks whose models have the same tensors, empty if all ranks' models do.

    Tensors that some of them share tell nothing.
    """
    stages: dict[frozenset[str], list[int]] = {}
    for rank, each in plans.items():
        own = frozenset(plan.name for plan in each if not plan.is_shared)
        stages.setdefault(own, []).append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in stages.values()) if len(stages) > 1 else ()


def is_shared(seen: Seen) -> bool:
    """Say whether some stages share a tensor, under names of their own."""
    return any(plan.is_shared for plan, _ in seen.values())


def _is_whole(seen: Seen, num_ranks: int) -> bool:
    return len(seen) == num_ranks or (is_shared(seen) and len(seen) > 1)
