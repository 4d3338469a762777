"""COL009: a collective stands under a condition that holds on some ranks only."""

from distdiag.checks.col.rank_guarded_collective import RankGuardedCollective as Check
from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardRule
from distdiag.lint.operations import Family


# A collective, or a call that leads to one through the given files, in a branch that some ranks do
# not enter, or behind a return, continue, break or raise that some ranks take. Silent where the
# other ranks make the same call in another branch, and where only the members of a group call it.
class RankGuardedCollective(GuardRule):
    """A collective stands under a condition that holds on some ranks only.

    ## What you see
    The ranks that call it wait for ever, or are paired with the next call of the others: a
    collective is complete when every rank of its group has called it.

    ## Example
        # wrong: the barrier is for rank 0 alone
        if rank == 0:
            torch.save(model.state_dict(), path)
            dist.barrier()
        # right: only the writing is
        if rank == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()

    ## How to fix
    Call it on all ranks and guard only the part that is for one: the writing, the printing.

    ## When it is not a defect
    The ranks that the condition keeps away make the same call in another place.

    A rank that raises ends the job anyway: that is a note. To silence a line, end it with
    `# distdiag: ignore[COL009]`.

    ## References
    - https://github.com/huggingface/transformers/issues/29980
    - https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
    """

    code = Check.code
    name = Check.name
    severity = Severity.ERROR
    family = Family.COLLECTIVE
