"""BAR001: a rank reads a file that another rank writes, and nothing makes it wait."""

from distdiag.checks.bar.races import FileRace, RaceKind, barrier_advice, unordered
from distdiag.findings.finding import Severity
from distdiag.views.files import Race


class UnorderedFileAccess(FileRace):
    """A rank reads a file that another rank writes, and nothing makes it wait.

    ## What you see
    On a large cluster a rank reads half a file, or no file, although the program works on a fast
    disk with few ranks. No barrier, collective, message or file lock makes the reader wait until
    the file is complete.

    ## Example
        # wrong: the others may load before the file is there
        if rank == 0:
            torch.save(tokenize(data), "cache.pt")
        data = torch.load("cache.pt")

        # right: a barrier between the write and the read, outside of the condition
        if rank == 0:
            torch.save(tokenize(data), "cache.pt")
        dist.barrier()
        data = torch.load("cache.pt")

    ## How to fix
    Call `dist.barrier()` on all ranks between the write and the read, outside of any condition on
    the rank. Or let the writer broadcast what it has made
    (`dist.broadcast_object_list([data], src=0)`).

    Changes: The ranks wait at the barrier for the slowest rank.

    Leaves: Readers in other programs, and file systems that show a new file late.

    ## When it is not a defect
    Something that is not observed makes the reader wait for the writer between the two lines.

    A reader that handles a missing file is fine if the file appears at once, by a rename. To
    silence it, set `ignore = ["BAR001"]` in `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/Megatron-DeepSpeed/issues/356
    - https://github.com/allenai/OLMo/issues/234
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
    - https://huggingface.co/docs/accelerate/package_reference/accelerator
    """

    code = "BAR001"
    name = "unordered-file-access"
    severity = Severity.WARNING
    kind = RaceKind.UNORDERED

    def describe(self, race: Race) -> str:
        """Name the read first: it is what goes ahead too early."""
        return unordered(race.uses, race.changes, race)

    def advise(self, race: Race) -> str:
        """Return where a barrier belongs."""
        return barrier_advice(race)
