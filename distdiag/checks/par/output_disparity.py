"""PAR009: a module returns something else on N ranks than on one, for the same samples."""

from distdiag.checks.par.divergence import DisparityCheck, because, figures, subjects_of
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class OutputDisparity(DisparityCheck):
    """A module returns something else on N ranks than on one, for the same samples.

    ## What you see
    The forward pass computes a different function on N ranks than on one, and loss and gradients
    are wrong as a consequence. The finding names the first module whose output differs by more than
    rounding; the input of this module was the same.

    ## Example
        # wrong: each rank places its part of the sequence at the beginning
        positions = torch.arange(part.shape[1])
        # right
        begin = rank * part.shape[1]
        positions = torch.arange(begin, begin + part.shape[1])

    ## How to fix
    Make the named module independent of the rank and of the local batch. Or synchronise the values
    that its ranks share.

    Changes: The outputs of the module on the ranks where they differ.

    Leaves: Differences in later modules that have a cause of their own.

    ## When it is not a defect
    The module is intended to depend on the batch of its rank, as batch normalisation does, or draws
    random numbers.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    code = "PAR009"
    name = "output-disparity"
    severity = Severity.ERROR
    subject = Subject.OUTPUT

    def message(self, event: Divergence) -> str:
        """Name the first module whose output differs."""
        where = f" on {event.culprits.phrase()}" if event.culprits else ""
        first = event.differences[0]
        message = (
            f"at step {event.step} the output of {subjects_of(event)[0]} differs between "
            f"{event.candidate}{where} and {event.reference} for the same samples: {figures(first)}"
        )
        return message + because(event)
