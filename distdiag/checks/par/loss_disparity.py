"""PAR010: the loss over the ranks is not the loss of the same samples on one rank."""

from distdiag.checks.par.divergence import DisparityCheck, because, figures
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class LossDisparity(DisparityCheck):
    """The loss over the ranks is not the loss of the same samples on one rank.

    ## What you see
    The ranks optimise a different objective than one rank: some samples or tokens weigh more than
    others. The modules return the same values as on one rank, but neither the mean nor the sum of
    the ranks' losses is the loss of one rank.

    ## Example
        # wrong: the mean over this rank's own valid tokens
        loss = token_losses[mask].mean()
        # right: DDP averages over ranks, so multiply by their number
        count = mask.sum()
        dist.all_reduce(count)
        loss = token_losses[mask].sum() / count * dist.get_world_size()

    ## How to fix
    Divide the sum of the loss by the number of elements of all ranks and micro-steps of this step:
    `dist.all_reduce(count)`, then `loss.sum() / count` (times the number of ranks, if gradients are
    averaged over them).

    Changes: The effective learning rate of samples on ranks with few elements.

    Leaves: The logged loss, if it is averaged at a different place.

    ## When it is not a defect
    The loss of a batch is intended to be something other than a mean over its samples, as with
    contrastive losses.

    ## References
    - https://github.com/PrimeIntellect-ai/prime-rl/issues/1961
    """

    code = "PAR010"
    name = "loss-disparity"
    severity = Severity.WARNING
    subject = Subject.LOSS

    def message(self, event: Divergence) -> str:
        """Say by how much the losses differ, and with which weights the ranks enter."""
        return (
            f"at step {event.step} the loss of {event.candidate} differs from that of "
            f"{event.reference}: {figures(event.differences[0])}{because(event)}"
        )
