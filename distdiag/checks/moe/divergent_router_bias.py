"""MOE013: ranks choose experts by a bias that is no longer the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import (
    NOT_REDUCED,
    evidence_of,
    first_and_more,
    grade_of,
    location_on,
    names_of,
    odd_ranks,
)
from distdiag.events.models import Moment
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import RouterBiasReplicas


class DivergentRouterBias(Check[RouterBiasReplicas]):
    """Ranks choose experts by a bias that is no longer the same on all of them.

    ## What it detects
    A tensor that a router adds to its scores before it chooses, and that no gradient trains: it was
    the same on the ranks that train the router together, and differs at a later optimizer step.
    Where no wrapper and no reduction tells which ranks these are, they are those on which the
    router's weight changes and stays the same. Buffers that DDP sends round before each forward
    pass are left alone.

    ## Why it matters
    Each rank balances its own tokens only, by a bias of its own, and sends equal tokens to other
    experts than the rest. What is saved is the bias of one rank, which fits the others badly.

    ## Example
    Balancing without a loss: the bias goes up for experts with few tokens, but the counts are those
    of one rank, or one rank alone updates its bias.

    ## How to fix
    All-reduce the counts of tokens over all ranks that hold the router, once, before the bias is
    updated, and update it on all of them.

    ## References
    - Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024
    """

    code = "MOE013"
    name = "divergent-router-bias"
    severity = Severity.WARNING

    why = "Nothing but equal counts keeps the bias equal: no gradient of it is reduced."
    fix = "All-reduce the counts of tokens for each expert before every update of the bias."
    fix_changes = "The bias, and so the choice of experts, on all ranks."
    fix_leaves = "The difference that is there already: broadcast the bias once."
    disproof = "The bias is the same on these ranks when the optimizer steps."

    def check(self, view: RouterBiasReplicas) -> Iterator[Finding]:
        """Judge biases that were alike before."""
        if view.moment is not Moment.STEP or view.alike_at is None or view.basis in NOT_REDUCED:
            return
        tensors = [tensor for tensor in view.tensors if tensor.plan.is_routing_bias]
        if not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        names = names_of(tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}, by which experts are chosen: the same on "
            f"{view.ranks.phrase()} until step {view.alike_at}, and different before step "
            f"{view.step}",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=0.9,
            evidence=evidence_of(view, tensors),
        )
