"""What ranks have done with the copies of a gradient or parameter, as contents tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from distdiag.gradient_view import Sum
from distdiag.model_event import Basis, Content, TensorPlan
from distdiag.model_view import Disagreement

Copies = Mapping[int, tuple[TensorPlan, Content]]
"""A tensor as each rank plans and holds it."""

_ROUNDING: Final = 1e-3
"""Gradients that ranks have computed from the same may differ by so much."""


def are_equal(copies: Copies) -> bool:
    """Say whether all ranks hold the same bytes."""
    return len(_digests(copies)) == 1


def are_apart(copies: Copies) -> bool:
    """Say whether no two ranks hold the same bytes, read in the same way."""
    digests = _digests(copies)
    return len(digests) == len(copies) and len({digest[:1] for digest in digests}) == 1


def is_zero(copies: Copies) -> bool:
    """Say whether a gradient is zero on all ranks: that of a part that is not used yet."""
    return all(c.least == c.greatest == 0 for _, c in copies.values())


def has_one_owner(copies: Copies) -> bool:
    """Say whether the same optimizers hold a parameter on all ranks."""
    owners = {plan.owners for plan, _ in copies.values()}
    return len(owners) == 1 and owners != {()}


def sum_of(copies: Copies, before: Copies | None) -> Sum:
    """Return what was done with a gradient, of which the backward pass left what was `before`."""
    bases = {plan.basis for plan, _ in copies.values()}
    if are_equal(copies):
        is_sent = bases == {Basis.REDUCED} and all(
            plan.replicas == next(iter(copies.values()))[0].replicas for plan, _ in copies.values()
        )
        was_other = before is not None and not are_equal(before)
        return Sum.SUMMED if is_sent or was_other else Sum.OTHER
    plan = next(iter(copies.values()))[0]
    found = Disagreement(plan, {rank: content for rank, (_, content) in copies.items()})
    is_clear = math.isfinite(found.difference) and found.difference > _ROUNDING
    return Sum.OWN if are_apart(copies) and is_clear and bases == {Basis.WORLD} else Sum.OTHER


def _digests(copies: Copies) -> set[str]:
    return {content.digest for _, content in copies.values()}
