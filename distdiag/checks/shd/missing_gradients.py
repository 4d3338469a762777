"""SHD005: an optimizer steps though none of its parameters has a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.models import OptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OptimizerView

_MOST_SKIPPED: Final = 2


class MissingGradients(Check[OptimizerView]):
    """An optimizer steps though none of its parameters has a gradient.

    ## What it detects
    An optimizer that is about to step after a backward pass, all of whose parameters belong to
    models, while no parameter of any model has a gradient, on some ranks or on all. A note for one
    that had gradients before: a bad batch may have been left out on purpose.

    ## Why it matters
    Optimizers skip parameters without a gradient and say nothing. The step changes nothing.

    ## Example
    `set_requires_gradient_sync(False)` that is never set back: FSDP2 then keeps the gradients to
    itself, and every `grad` is None.

    ## How to fix
    Switch the reduction on for the last micro-batch of each step; make sure that `zero_grad` does
    not stand between the backward pass and the step.

    ## References
    - `torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync`
    """

    code = "SHD005"
    name = "missing-gradients"
    severity = Severity.ERROR

    why = "A parameter whose `grad` is None is left out of the step without a word."
    fix = "Let the last backward pass before the step reduce and store the gradients."
    fix_changes = "The weights begin to change at this step."
    fix_leaves = "The steps before, which did nothing."
    disproof = "A parameter of the optimizer has a gradient then, or is not meant to move."

    def check(self, alignment: OptimizerView) -> Iterator[Finding]:
        """Judge optimizers that have nothing to apply."""
        if alignment.kind != "optimizer":
            return
        empty = {rank: state for rank, state in alignment.by_rank.items() if _is_empty(state)}
        if not empty:
            return
        ranks = RankSet(empty)
        first = empty[min(empty)]
        location = user_location(first.site.frames)
        yield self.finding(
            f"{first.optimizer} steps on {ranks.phrase()} though none of its "
            f"{first.num_parameters} parameters has a gradient",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=(first.optimizer,),
            grade=Grade.NOTE if all(map(_is_skipped, empty.values())) else Grade.PROVEN,
            evidence=(
                Evidence(ranks=ranks, summary="every `grad` is None", location=location),
                *(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"{state.num_parameters - state.num_without_gradient} of "
                        f"{state.num_parameters} parameters have a gradient",
                    )
                    for rank, state in alignment.by_rank.items()
                    if rank not in empty
                ),
            ),
        )


def _is_empty(state: OptimizerState) -> bool:
    is_idle = state.num_without_gradient == state.num_parameters > 0
    is_sole = state.num_gradients == 0  # else it may wait for its turn
    return is_idle and is_sole and not state.num_foreign and state.num_backwards > 0


def _is_skipped(state: OptimizerState) -> bool:
    return state.was_fed and state.num_idle <= _MOST_SKIPPED
