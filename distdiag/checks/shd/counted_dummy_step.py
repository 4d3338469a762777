"""SHD008: a step without gradients counts in the state of an optimizer."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView


class CountedDummyStep(Check[OptimizerView]):
    """A step whose gradients were all zero counts in the state of an optimizer.

    ## What you see
    The first real updates are too small. The optimizer has counted a step whose gradients were all
    zero, so its bias correction expects running averages that this step did not fill. Weight decay
    may also have moved the weights in that step.

    ## Example
        # wrong: a step that only creates the optimizer's state counts
        optimizer.step()
        # right
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].zero_()  # and restore lr and weight_decay

    ## How to fix
    For the step with zero gradients set `lr` and `weight_decay` in `optimizer.param_groups` to
    zero, and after it set each `state["step"]` in `optimizer.state.values()` back to zero
    (`state["step"].zero_()`).

    Changes: The size of the first updates: they become the same as those of a new optimizer.

    Leaves: The effect of weight decay in that step, unless it was zero.

    ## When it is not a defect
    Every `step` in `optimizer.state` is zero before the first real step.

    If so, add `ignore = ["SHD008"]` to `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA/Megatron-LM/issues/5974
    """

    code = "SHD008"
    name = "counted-dummy-step"
    severity = Severity.WARNING

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Compare the counter with the steps that were taken."""
        counted = {
            rank: state
            for rank, state in view.by_rank.items()
            if 0 < state.num_zero_steps < 3 and state.least_count == state.num_steps
        }
        if counted.keys() != view.by_rank.keys():
            return
        ranks = RankSet(counted)
        first = counted[min(counted)]
        yield self.finding(
            f"{first.optimizer} counts {first.least_count} steps, {first.num_zero_steps} of them "
            "with gradients that were all zero",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(first.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.8,
            evidence=(
                f"{first.num_steps} steps before this one, the step counter in its state "
                f"says {first.least_count}"
            ),
        )
