"""PAR012: an optimizer changes parameters otherwise on N ranks than on one."""

from distdiag.checks.par.divergence import (
    DisparityCheck,
    because,
    figures,
    how_many,
)
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class UpdateDisparity(DisparityCheck):
    """An optimizer changes parameters otherwise on N ranks than on one.

    ## What you see
    The two runs diverge from this step on. Their gradients agree, but the optimizer step changes
    the parameters differently.

    ## Example
        # wrong: the rate depends on the number of ranks
        optimizer = AdamW(model.parameters(), lr=1e-4 * dist.get_world_size())
        # right: for the same global batch
        optimizer = AdamW(model.parameters(), lr=1e-4)

    ## How to fix
    Use the same learning rate, clipping norm and optimizer state for every number of ranks.

    Changes: The size of the steps.

    Leaves: A schedule whose length depends on the number of ranks.

    ## When it is not a defect
    The learning rate is intended to depend on the number of ranks, or its schedule to advance once
    for each rank. Therefore different learning rates are only a warning; say so with
    `--accept PAR012`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
    """

    code = "PAR012"
    name = "update-disparity"
    severity = Severity.ERROR
    subject = Subject.UPDATE

    def severity_of(self, event: Divergence) -> Severity:
        """Warn of learning rates, which may be intended to depend on the number of ranks."""
        return Severity.WARNING if event.details else self.severity

    def message(self, event: Divergence) -> str:
        """Name the first parameter whose change differs, and what explains it."""
        first = event.differences[0]
        message = (
            f"at step {event.step} {how_many(event)} of {event.num_compared} parameters of "
            f"{event.candidate} change differently than in {event.reference}: the change of "
            f"{figures(first)}{because(event)}"
        )
        if "/" not in first.name:  # no parameter, and rounding hides what it does to them
            message = (
                f"at step {event.step} of {event.candidate} the {figures(first)}, compared with "
                f"{event.reference}{because(event)}"
            )
        return message
