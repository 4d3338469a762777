"""PAR008: runs on different numbers of ranks begin with different weights."""

from distdiag.checks.par.divergence import (
    DisparityCheck,
    figures,
    how_many,
)
from distdiag.events.comparisons import Divergence, Subject
from distdiag.findings.finding import Severity


class StartDisparity(DisparityCheck):
    """Runs on different numbers of ranks begin with different weights.

    ## What you see
    The two runs start with different weights, so every later difference may come from that. Usually
    each rank draws its own part of a sharded parameter.

    ## Example
        # wrong: the parts come from different seeds
        torch.manual_seed(rank)
        fully_shard(model := build_model())
        # right
        torch.manual_seed(0)
        fully_shard(model := build_model())
        torch.manual_seed(rank)

    ## How to fix
    Build the model with the same seed on all ranks (`torch.manual_seed(seed)`), or load the same
    checkpoint. Set seeds that depend on the rank after that (`torch.manual_seed(seed + rank)`).

    Changes: The weights that training begins with.

    Leaves: Random numbers that are drawn later, for example for dropout.

    ## When it is not a defect
    The parameters of both runs are equal, bit by bit, before the first step.

    If so, say `--accept PAR008`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "PAR008"
    name = "start-disparity"
    severity = Severity.ERROR
    subject = Subject.START
    may_be_meant = False

    def message(self, event: Divergence) -> str:
        """Name the parameters that begin with other values."""
        return (
            f"{event.candidate} begins with different weights than {event.reference}: "
            f"{how_many(event)} of {event.num_compared} parameters; {figures(event.differences[0])}"
        )
