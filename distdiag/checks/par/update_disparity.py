"""PAR012: an optimizer changes parameters otherwise on N ranks than on one."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.divergence import evidence_of, figures, how_many, reason, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Finding, Grade, Severity


class UpdateDisparity(Check[Divergence]):
    """An optimizer changes parameters otherwise on N ranks than on one.

    ## What it detects
    The gradients of both runs agree, and what the step makes of a parameter differs by more
    than rounding explains.

    ## Why it matters
    The runs part from here on, though nothing is wrong with the gradients.

    ## Example
    A learning rate scaled by the number of ranks; clipping by the norm of a local shard.

    ## How to fix
    Compare learning rates, clipping and optimizer states between the runs.

    ## References
    - torch.nn.utils.clip_grad_norm_
    """

    code = "PAR012"
    name = "update-disparity"
    severity = Severity.ERROR

    why = (
        "With the same gradients and states the same step follows, however parameters are sharded."
    )
    fix = "Use one learning rate and clipping norm whatever the number of ranks."
    fix_changes = "The size of the steps."
    fix_leaves = "A schedule whose length depends on the number of ranks."
    disproof = "The changes of the parameters in this step agree within the bound."

    def check(self, event: Divergence) -> Iterator[Finding]:
        """Name the first parameter whose change differs, and what explains it."""
        if event.subject is not Subject.UPDATE:
            return
        first = event.differences[0]
        message = (
            f"at step {event.step} {how_many(event)} of {event.num_compared} parameters of "
            f"{event.candidate} are changed otherwise than in {event.reference}: the change of "
            f"{figures(first)}{reason(event)}"
        )
        if "/" not in first.name:  # no parameter, and rounding hides what it does to them
            message = (
                f"at step {event.step} of {event.candidate} the {figures(first)}, with respect to "
                f"{event.reference}{reason(event)}"
            )
        yield self.finding(
            message,
            ranks=event.culprits,
            step=event.step,
            subjects=subjects_of(event),
            evidence=evidence_of(event),
            grade=Grade.NOTE if event.is_doubtful else Grade.PROVEN,
        )
