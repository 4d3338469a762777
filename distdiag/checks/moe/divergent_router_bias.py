"""MOE013: ranks choose experts by a bias that is no longer the same on all of them."""

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
from distdiag.findings.finding import Finding, Severity
from distdiag.views.models import RouterBiasReplicas


class DivergentRouterBias(Check[RouterBiasReplicas]):
    """Ranks choose experts by a bias that is no longer the same on all of them.

    ## What you see
    The ranks send equal tokens to different experts, and the checkpoint holds the bias of one rank,
    which fits the other ranks badly. Each rank updates the bias from its own counts of tokens, and
    no gradient keeps the copies equal.

    ## Example
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        # right: this line; wrong: without it, each rank counts its own tokens
        dist.all_reduce(counts, group=dp_group)
        bias += rate * torch.sign(counts.float().mean() - counts)

    ## How to fix
    Before every update of the bias, all-reduce the counts of tokens per expert over all ranks that
    hold the router (`dist.all_reduce(counts)`), and update the bias on all of these ranks.

    Changes: The bias, and so the choice of experts, on all ranks.

    Leaves: The difference between the ranks that exists already: broadcast the bias once.

    ## When it is not a defect
    The bias is equal on these ranks when the optimizer steps, or each rank is intended to route
    with its own bias.

    If so, add `ignore = ["MOE013"]` to `distdiag.toml`.

    ## References
    - https://arxiv.org/abs/2408.15664
    """

    code = "MOE013"
    name = "divergent-router-bias"
    severity = Severity.WARNING

    def check(self, view: RouterBiasReplicas) -> Iterator[Finding]:
        """Judge biases that were equal before."""
        if view.alike_at is None or view.evidence in NOT_REDUCED:
            return
        tensors = [tensor for tensor in view.tensors if tensor.plan.is_routing_bias]
        if not tensors:
            return
        culprits, has_culprit = odd_ranks(tensors)
        names = names_of(tensors)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}, which chooses experts: equal on "
            f"{view.ranks.phrase()} until step {view.alike_at}, different before step "
            f"{view.step}",
            ranks=culprits,
            step=view.step,
            location=location_on(view, culprits),
            subjects=names,
            grade=grade_of(view, has_culprit=has_culprit),
            confidence=0.9,
            evidence=evidence_of(view, tensors),
        )
