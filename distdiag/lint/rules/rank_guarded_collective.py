"""COL009: a collective stands under a condition that holds on some ranks only."""

from __future__ import annotations

from distdiag.checks.col.rank_guarded_collective import RankGuardedCollective as Check
from distdiag.findings.finding import Severity
from distdiag.lint.guarded import GuardRule
from distdiag.lint.operations import Family


class RankGuardedCollective(GuardRule):
    """A collective stands under a condition that holds on some ranks only.

    ## What it detects
    A collective, or a call that leads to one through the given files, inside a branch that some
    ranks do not enter (`if rank == 0:`, `if accelerator.is_main_process:`, a `rank_zero_only`
    decorator), or behind a return, continue, break or raise that some ranks take. Silent where the
    other ranks make the same call in another branch, and where only the members of a group call it.

    ## Why it matters
    A collective is complete when every rank of its group has called it. The ranks that called it
    wait for ever, or are paired with the next call of the others. A rank that raises ends the job
    anyway: that is a note.

    ## Example
    `if rank == 0: dist.barrier()`

    ## How to fix
    Call it on all ranks and guard only the part that is for one: the writing, the printing.

    ## References
    - `torch.distributed`: collective functions are called on every rank of the group
    """

    code = Check.code
    name = Check.name
    severity = Severity.ERROR
    family = Family.COLLECTIVE
