"""PAR018: an optimizer computes with a rank's part of a parameter as if it were the whole."""

from typing import ClassVar

from distdiag.checks.par.divergence import DisparityCheck, doubt, figures, listed
from distdiag.events.comparisons import Divergence, Reason
from distdiag.findings.finding import Severity


class ShardWiseUpdate(DisparityCheck):
    """An optimizer computes with a rank's part of a parameter as if it were the whole.

    ## What you see
    Parameters that are sharded get a different update than on one rank, although all gradients
    agree. The optimizer computes a norm, an orthogonalisation or a factorisation of each rank's
    part, which is not the part of the result for the whole parameter.

    ## Example
        # wrong: orthogonalises the rows of this rank
        update = orthogonalise(gradient.to_local())
        # right
        whole = orthogonalise(gradient.full_tensor())
        update = distribute_tensor(whole, gradient.device_mesh, gradient.placements)

    ## How to fix
    Compute the update from the whole matrix (`p.grad.full_tensor()`) and keep this rank's part of
    the result. Or, for a norm, all-reduce the squared norm over the ranks that hold the parts.

    Changes: The updates of the named parameters, and the memory and traffic of a step.

    Leaves: Optimizer states of older checkpoints.

    ## When it is not a defect
    The optimizer is intended to work on blocks, and the blocks are the parts of the ranks. Say so
    with `--accept PAR018`.

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
            f"{event.candidate} differently from {event.reference}, although all gradients agree: "
            "each rank computes with its own part of the parameter; the change of "
            f"{figures(event.differences[0])}{doubt(event)}"
        )
