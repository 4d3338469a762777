"""SHD005: an optimizer steps though none of its parameters has a gradient."""

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

    ## What you see
    The step changes nothing, and no error says so: optimizers skip parameters whose `grad` is None.
    Something cleared the gradients before the step, or no backward pass wrote gradients to these
    parameters.

    ## Example
        for number, batch in enumerate(micro_batches):
            # wrong: never switched on again; FSDP2 keeps the gradients to itself
            model.set_requires_gradient_sync(False)
            # right
            model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            model(batch).backward()
        optimizer.step()

    ## How to fix
    Call `loss.backward()`, `optimizer.step()` and `optimizer.zero_grad()` in this order, so that
    nothing clears the gradients before the step. With FSDP2, call
    `model.set_requires_gradient_sync(True)` before the last backward pass of each step.

    Changes: The weights begin to change at this step.

    Leaves: Earlier steps that changed nothing.

    ## When it is not a defect
    The step is intended to be empty, for example for a batch that all ranks skip.

    If so, add `ignore = ["SHD005"]` to `distdiag.toml`. Once or twice it is only a note.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "SHD005"
    name = "missing-gradients"
    severity = Severity.ERROR

    def check(self, view: OptimizerView) -> Iterator[Finding]:
        """Judge optimizers that have nothing to apply."""
        empty = {rank: state for rank, state in view.by_rank.items() if _is_empty(state)}
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
                    for rank, state in view.by_rank.items()
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
