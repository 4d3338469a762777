"""BAR004: a rank lists a folder while another rank changes it."""

from collections.abc import Iterator
from itertools import takewhile

from distdiag.checks.bar.races import FileRace, RaceKind, barrier_advice, first_of, unordered
from distdiag.events.base import CallSite
from distdiag.findings.finding import Finding, Severity
from distdiag.views.files import Race


class ListingWhileWritten(FileRace):
    """A rank lists a folder while another rank changes it.

    ## What you see
    The list of files lacks entries, or holds temporary names that no longer exist a moment later,
    and ranks continue with different sets of files. A rank lists the folder while another rank
    changes it.

    ## Example
        # wrong: rank 0 may still be writing
        if rank == 0:
            save_checkpoint(folder)
        files = os.listdir(folder)

        # right
        if rank == 0:
            save_checkpoint(folder)
        dist.barrier()
        files = os.listdir(folder)

    ## How to fix
    Call `dist.barrier()` on all ranks between the last change and the listing. Or list on one rank
    and broadcast the names (`dist.broadcast_object_list(names, src=0)`).

    Changes: The listing waits for the slowest writer.

    Leaves: Files of earlier runs in the same folder.

    ## When it is not a defect
    Something that distdiag does not observe makes the listing rank wait for the writer between the
    two lines.

    To silence it, set `ignore = ["BAR004"]` in `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/591
    - https://docs.python.org/3/library/os.html#os.listdir
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.broadcast_object_list
    """

    code = "BAR004"
    name = "listing-while-written"
    severity = Severity.WARNING
    kind = RaceKind.LISTED

    def check(self, race: Race) -> Iterator[Finding]:
        """Judge the listing if the user's code has asked for it."""
        # Many packages list on every rank, and go on with what rank 0 has found.
        if not all(_is_by_package(access.event.site) for access in race.uses.values()):
            yield from super().check(race)

    def describe(self, race: Race) -> str:
        """Name the listing first, with an entry that may or may not be in it."""
        entry = first_of(race.changes).event.written
        pair = unordered(race.uses, race.changes, race)
        return f"{pair}: whether {entry} is listed depends on timing"

    def advise(self, race: Race) -> str:
        """Return where a barrier belongs."""
        return barrier_advice(race)


def _is_by_package(site: CallSite) -> bool:
    inner = takewhile(lambda frame: not frame.user, site.frames)
    return any("-packages/" in frame.file for frame in inner)
