"""SHD008: a step without gradients counts in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView


class CountedDummyStep(Check[OptimizerView]):
    """A step whose gradients were all zero counts in the state of an optimizer.

    ## What it detects
    An optimizer that has stepped without a backward pass on gradients that were all zero, and whose
    step counter includes that step when it steps with real ones.

    ## Why it matters
    The counter corrects the bias of running averages. A step too many, with empty averages, makes
    the first real updates too small; weight decay of that step has moved the weights.

    ## Example
    A dummy step that makes the optimizer create its state before a checkpoint is loaded or memory
    is measured.

    ## How to fix
    Set learning rate and weight decay to zero for that step, and every `step` in the state back to
    zero after it.

    ## References
    - NVIDIA/Megatron-LM#5974
    """

    code = "SHD008"
    name = "counted-dummy-step"
    severity = Severity.WARNING

    why = "An optimizer counts its calls of `step`, whatever the gradients are."
    fix = "Reset the step counters after the step that only creates the state."
    fix_changes = "The size of the first updates: they become those of a fresh optimizer."
    fix_leaves = "What weight decay did in that step, unless it was zero."
    disproof = "Before the first real step, every `step` in the state is zero."

    def check(self, alignment: OptimizerView) -> Iterator[Finding]:
        """Compare the counter with the steps that were taken."""
        counted = {
            rank: state
            for rank, state in alignment.by_rank.items()
            if 0 < state.num_zero_steps < 3 and state.least_count == state.num_steps
        }
        if counted.keys() != alignment.by_rank.keys():
            return
        ranks = RankSet(counted)
        first = counted[min(counted)]
        location = user_location(first.site.frames)
        yield self.finding(
            f"{first.optimizer} counts {first.least_count} steps, {first.num_zero_steps} of them "
            "with gradients that were all zero",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=(first.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.8,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{first.num_steps} steps before this one, the counter in the state "
                    f"says {first.least_count}",
                    location=location,
                ),
            ),
        )
