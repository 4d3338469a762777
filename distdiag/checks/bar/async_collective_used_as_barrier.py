"""BAR007: a file access relies on an asynchronous collective that was not waited for."""

from distdiag.checks.bar.races import FileRace, RaceKind, bypassed, phrase, several
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Severity
from distdiag.views.files import Race


class AsyncCollectiveUsedAsBarrier(FileRace):
    """A file access relies on an asynchronous collective that was not waited for.

    ## What you see
    The file is read before it is written, although a collective seems to order the two. The call of
    an asynchronous collective does not make the host wait for the other ranks. With NCCL even
    `wait()` does not: only the GPU's stream waits.

    ## Example
        # wrong: returns at once
        dist.barrier(async_op=True)
        data = torch.load("cache.pt")
        # wrong with NCCL: the device waits, the host goes on
        dist.all_reduce(ready)
        data = torch.load("cache.pt")

        # right
        dist.barrier()
        data = torch.load("cache.pt")

    ## How to fix
    Call `dist.barrier()` before the access. Or keep the Work and call `work.wait()`, and on GPUs
    `torch.cuda.synchronize()` after it.

    Changes: The host waits there for the slowest rank.

    Leaves: File accesses that come before the collective.

    ## When it is not a defect
    The host waited for the collective in a way that distdiag does not observe.

    To silence it, set `ignore = ["BAR007"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations
    - https://docs.pytorch.org/docs/stable/generated/torch.cuda.synchronize.html
    """

    code = "BAR007"
    name = "async-collective-used-as-barrier"
    severity = Severity.WARNING
    kind = RaceKind.UNWAITED

    def describe(self, race: Race) -> str:
        """Name the collective that does not order them."""
        call = bypassed(race)
        assert call is not None
        which = f"{call_phrase(call)}{at(call_location(call))}"
        if "gloo" in call.group.backend or call.signature.op == "barrier":
            when = f"before it has waited for {which}"
        else:
            when = f"while {which} may still run, since only the stream waits for it"
        return (
            f"{phrase(race.uses)} {when}; {phrase(race.changes)}{several(race)}, and nothing else "
            "orders the two"
        )
