"""PAR018: an optimizer computes with a rank's part of a parameter as if it were the whole."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, listed
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class ShardWiseUpdate(DisparityCheck):
    """An optimizer computes with a rank's part of a parameter as if it were the whole.

    ## What you see
    Gradients agree with those of one rank, and so do the updates of parameters that are whole on
    each rank. Those that are spread are updated otherwise: a norm, an orthogonalisation or a
    factorisation of a part is not the part of that of the whole.

    ## Example
        # wrong: orthogonalises the rows of this rank
        update = orthogonalise(gradient.to_local())
        # right
        whole = orthogonalise(gradient.full_tensor())
        update = distribute_tensor(whole, gradient.device_mesh, gradient.placements)

    ## How to fix
    Compute the update of the whole matrix (`full_tensor()`, or reduce the norm over the ranks that
    hold its parts), and take this rank's part of the result.

    Changes: The updates of the named parameters, and the memory and traffic of a step.

    Leaves: Optimizer states of older checkpoints.

    ## When it is not a defect
    The optimizer is meant to work on blocks, and the blocks are the parts of the ranks. Say so with
    `--accept PAR018`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/pull/8437
    """

    code = "PAR018"
    name = "shard-wise-update"
    severity = Severity.ERROR
    reason: ClassVar[Reason] = Reason.SHARDS

    def message(self, event: Divergence) -> str:
        """Name the optimizer and what it updates otherwise."""
        return (
            f"at step {event.step} {event.explanation} updates {listed(event)} of "
            f"{event.candidate} otherwise than of {event.reference}, though all gradients agree: "
            "each rank computes with its own part of the parameter; the change of "
            f"{figures(event.differences[0])}{doubt(event)}"
        )
