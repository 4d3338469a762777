"""BAR007: an asynchronous collective stands where a barrier is needed, and is not waited for."""

from __future__ import annotations

from distdiag.checks.bar.races import FileRace, RaceKind, bypassed, phrase, several
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Severity
from distdiag.views.files import Race


class AsyncCollectiveUsedAsBarrier(FileRace):
    """An asynchronous collective stands where a barrier is needed, and is not waited for.

    ## What it detects
    Accesses to one file that nothing orders, with a collective between them that was issued and not
    waited for before the second access. On GPUs that is also a collective whose stream alone waits:
    the host goes on.

    ## Why it matters
    The line looks like a synchronisation and is none: the file is read before it is written.

    ## Example
    `dist.barrier(async_op=True)` without `wait()`; on NCCL an `all_reduce` of a flag before a load.

    ## How to fix
    Wait for its Work before the access; on GPUs call `barrier`, or synchronise the device.

    ## References
    - `torch.distributed.Work.wait`, `torch.cuda.synchronize`
    """

    code = "BAR007"
    name = "async-collective-used-as-barrier"
    severity = Severity.WARNING
    kind = RaceKind.UNWAITED

    why = "Issuing a collective does not make the host wait for the other ranks."
    fix = "Wait for it before the access: keep the Work and call wait(), or use dist.barrier()."
    fix_changes = "The host waits there for the slowest rank."
    fix_leaves = "Accesses before the collective."
    disproof = "The host waited for the collective in a way that is not observed."

    def say(self, race: Race) -> str:
        """Name the collective that does not order them."""
        call = bypassed(race)
        assert call is not None
        return (
            f"{phrase(race.uses)} before it has waited for {call_phrase(call)}"
            f"{at(call_location(call))}, so nothing orders that with {phrase(race.changes)}"
            f"{several(race)}"
        )

    def advise(self, race: Race) -> str:
        """Return what to change: the collective is there, its wait is not."""
        return self.fix
