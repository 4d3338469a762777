"""COL006: ranks name different roots for one collective."""

from collections.abc import Iterator

from distdiag.checks.col.mismatch import CallMismatch, each_group
from distdiag.checks.shared.culprits import group_by
from distdiag.checks.shared.explanations import unexplained
from distdiag.findings.descriptions import call_phrase
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect


class RootMismatch(CallMismatch):
    """Ranks name different roots for one collective.

    ## What you see
    The call hangs, or a rank keeps a value that no other rank has. One rank, the root, sends and
    the other ranks receive, but here the ranks name different roots.

    ## Example
        # wrong: every rank names itself
        dist.broadcast(flag, src=dist.get_rank())

        # right: the same global rank everywhere
        dist.broadcast(flag, src=0)
        # right: in a subgroup, by the rank within the group
        dist.broadcast(flag, group=group, group_src=0)

    ## How to fix
    Pass the same global rank on all ranks: `dist.broadcast(tensor, src=0)`. For a rank within the
    group, pass `group_src=0` or `group_dst=0` instead.

    Changes: Which rank's value the others get.

    Leaves: Values that ranks already took from the wrong root.

    ## When it is not a defect
    All ranks' records of this call name the same root.

    To silence it, set `ignore = ["COL006"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.broadcast
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.get_global_rank
    """

    code = "COL006"
    name = "root-mismatch"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Group the ranks by the root that they named."""
        if unexplained(alignment) is not Aspect.ROOT:
            return
        groups = group_by(alignment, lambda call: call.signature.root)
        roots = each_group(alignment, groups, lambda call: f"rank {call.signature.root}")
        yield self.mismatch(
            alignment,
            groups,
            f"{call_phrase(alignment.any_event)} has different roots: {roots}",
            lambda call: f"names rank {call.signature.root} as root",
        )
