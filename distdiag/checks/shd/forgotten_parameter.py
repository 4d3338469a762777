"""SHD013: trainable parameters were made after the optimizers, and none of them holds them."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView


class ForgottenParameter(Check[OptimizerView]):
    """Trainable parameters were made after the optimizers, and no optimizer holds them.

    ## What you see
    A new part of the model never trains: its gradients are computed, reduced and thrown away. An
    optimizer holds only the parameters that exist when the optimizer is created, and these were
    created later.

    ## Example
        # wrong: the optimizer does not know the new head
        optimizer = AdamW(model.parameters())
        model.head = nn.Linear(512, 10)
        # right
        model.head = nn.Linear(512, 10)
        optimizer = AdamW(model.parameters())

    ## How to fix
    Create the optimizer after the model is complete. Or add the new parameters:
    `optimizer.add_param_group({"params": new.parameters()})`.

    Changes: The new part begins to train.

    Leaves: Parameters that should not train: set their `requires_grad` to False.

    ## When it is not a defect
    The parameters named here are not intended to train; then freeze them (`requires_grad_(False)`).

    If so, add `ignore = ["SHD013"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.add_param_group.html
    """

    code = "SHD013"
    name = "forgotten-parameter"
    severity = Severity.WARNING

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Name the parameters."""
        # Where an optimizer holds what these have replaced, SHD001 says so.
        ranks = RankSet(
            rank for rank, state in view.by_rank.items() if state.forgotten and not state.replaced
        )
        if not ranks:
            return
        first = view.by_rank[min(ranks)]
        yield self.finding(
            f"{first_and_more(first.forgotten)} have gradients, but no optimizer holds them: they "
            f"were created after {first.optimizer}",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=first.forgotten,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                f"{len(first.forgotten)} parameters with a gradient are in no "
                "optimizer, and their modules were created after all optimizers"
            ),
        )
