"""BAR009: ranks make up the path of one file by themselves, and it is not the same."""

import re
from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.files import FileAccess
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.files import MissingFile

_NUMBER: Final = re.compile(r"\d+")


class DisagreeingPath(Check[MissingFile]):
    """Ranks make up the path of one file by themselves, and it is not the same.

    ## What you see
    A rank fails because a file is not there, and the file is beside it, in a folder with almost the
    same name. It comes and goes: ranks that take the time on both sides of a second differ.

    ## Example
        # wrong: each rank asks its own clock
        folder = datetime.now().strftime("run-%H%M%S")

        # right: one rank names the folder for all
        name = [datetime.now().strftime("run-%H%M%S")]
        dist.broadcast_object_list(name)
        folder = name[0]

    ## How to fix
    Let one rank make the name from the clock, from random numbers or from a process id, and
    broadcast it; or take the name from the arguments of the job.

    Changes: All ranks use one folder.

    Leaves: What other ranks wrote into folders of their own in earlier runs.

    ## When it is not a defect
    The folders belong to different things, and the file is missing for another reason.

    To silence it, set `ignore = ["BAR009"]` in `distdiag.toml`.

    ## References
    - https://github.com/tier4/Diffusion-Planner/pull/429
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.broadcast_object_list
    """

    code = "BAR009"
    name = "disagreeing-path"
    severity = Severity.ERROR
    covers = ("HNG001",)

    def check(self, missing: MissingFile) -> Iterator[Finding]:
        """Judge a rank that ended because a file was not there."""
        found = {r: made for r, made in missing.namesakes.items() if _is_meant(missing, made)}
        if not found:
            return
        writer = min(found)
        made, own = found[writer], missing.folders.get(missing.rank)
        needed, wrote = user_location(missing.raised.frames), user_location(made.site.frames)
        named = user_location(own.site.frames) if own is not None else None
        yield self.finding(
            f"rank {missing.rank} needs {missing.written}{at(needed)}, and rank {writer} wrote it "
            f"as {made.written}{at(wrote)}: each made up the name of the folder by itself",
            ranks=RankSet([missing.rank, writer]),
            step=missing.raised.step,
            location=named or needed,
            subjects=(missing.path, made.path),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet([missing.rank]),
                    summary=f"raised {missing.raised.type}: {missing.raised.message}"[:300],
                    location=needed,
                ),
                *(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"made the folder {folder.written}",
                        location=user_location(folder.site.frames),
                    )
                    for rank, folder in sorted(missing.folders.items())
                    if rank in (missing.rank, writer)
                ),
            ),
        )


def _is_meant(missing: MissingFile, made: FileAccess) -> bool:
    """Say whether a file is the one that is needed, in a folder whose name alone is another.

    Its name differs in numbers only, or both ranks made their folder at the same place.
    """
    needed, written = missing.written.split("/"), made.written.split("/")
    if not missing.written or len(needed) != len(written):
        return False
    if sum(a != b for a, b in zip(needed, written, strict=True)) != 1:
        return False
    if _NUMBER.sub("#", missing.written) == _NUMBER.sub("#", made.written):
        return True
    mine, theirs = (missing.folders.get(rank) for rank in (missing.rank, made.rank))
    return (
        mine is not None
        and theirs is not None
        and mine.site.location is not None
        and mine.site.location == theirs.site.location
    )
