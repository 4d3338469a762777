"""BAR004: a rank lists a folder while another rank changes it, and uses what it found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from distdiag.checks.bar.races import FileRace, RaceKind, first_of, phrase
from distdiag.events.base import CallSite
from distdiag.findings.finding import Finding, Severity
from distdiag.views.files import Race


class ListingWhileWritten(FileRace):
    """A rank lists a folder while another rank changes it, and uses what it found.

    ## What it detects
    A listing of a folder, the creation, renaming or removal of an entry by another rank which
    nothing orders with it, and a use by the listing rank of an entry that came from another, before
    it has waited for anybody. Listings that an installed package makes for itself are left out:
    many list on every rank, and go on with what rank 0 has found.

    ## Why it matters
    The listing holds temporary names that are gone a moment later, or misses entries: ranks go on
    with different sets of files.

    ## Example
    The last rank walks through the checkpoint folder to upload it while rank 0 still writes.

    ## How to fix
    Put a barrier between the last change and the listing, or let one rank list and broadcast.

    ## References
    - `os.listdir`, `os.walk`, `glob.glob`
    - `torch.distributed.broadcast_object_list`
    """

    code = "BAR004"
    name = "listing-while-written"
    severity = Severity.WARNING
    kind = RaceKind.LISTED

    why = "What a listing holds depends on how far the other rank has come."
    fix = "Or list on one rank and broadcast the names."
    fix_changes = "The listing waits for the slowest writer."
    fix_leaves = "Files of earlier runs in the same folder."
    disproof = "A collective in which the listing rank waits for the writer lies between the two."

    def check(self, race: Race) -> Iterator[Finding]:
        """Judge the listing if the user's code has asked for it."""
        if not all(_is_by_package(access.event.site) for access in race.uses.values()):
            yield from super().check(race)

    def say(self, race: Race) -> str:
        """Name the listing first, with an entry that may or may not be in it."""
        entry = first_of(race.changes).event.written
        return (
            f"{phrase(race.uses)}, and nothing orders that with {phrase(race.changes)}: whether "
            f"{entry} is listed depends on luck"
        )


def _is_by_package(site: CallSite) -> bool:
    inner = takewhile(lambda frame: not frame.user, site.frames)
    return any("-packages/" in frame.file for frame in inner)
