"""BAR006: one rank of the job prepares a file that every node needs on storage of its own."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import rank_guards
from distdiag.views.files import MissingFile


class GuardByGlobalRank(Check[MissingFile]):
    """One rank of the job prepares a file that every node needs on storage of its own.

    ## What it detects
    A rank fails because a file is missing that no rank of its node has ever written, while another
    rank wrote a file of that name under a condition on the rank.

    ## Why it matters
    On one node it works. From the second node on nobody is responsible, and no barrier helps.

    ## Example
    `if rank == 0: build_index(cache_dir)` with a cache folder on the local disk of each node.

    ## How to fix
    Let local rank 0 of every node prepare it, then let all wait in a barrier; or share the storage.

    ## References
    - The environment variables `RANK`, `LOCAL_RANK` and `GROUP_RANK` of torchrun
    """

    code = "BAR006"
    name = "guard-by-global-rank"
    severity = Severity.ERROR

    why = (
        "The condition names one rank of the job, and storage that is local needs one of each node."
    )
    fix = "Let the condition ask for LOCAL_RANK == 0 where the storage is local to a node."
    fix_changes = "Every node prepares the file once."
    fix_leaves = "The other ranks of a node still need a barrier after it."
    disproof = "A rank of the failing rank's node has a record of writing this file."

    def check(self, missing: MissingFile) -> Iterator[Finding]:
        """Judge a rank that ended because a file was not there."""
        guards = {
            rank: guard
            for rank, access in missing.namesakes.items()
            for frame in access.site.user_frames
            for guard in rank_guards(frame)
        }
        if not guards:
            return
        writer = min(guards)
        made, guard = missing.namesakes[writer], guards[writer]
        location = user_location(missing.raised.frames)
        yield self.finding(
            f"rank {missing.rank} needs {missing.path}{at(location)}, and no rank of its node has "
            f"written it: `{guard.text}` at {guard.location} lets {RankSet(guards).phrase()} write "
            f"{made.written} only",
            ranks=RankSet(guards),
            step=made.step,
            location=guard.location,
            subjects=(missing.path, made.path),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet([missing.rank]),
                    summary=f"raised {missing.raised.type}: {missing.raised.message}"[:300],
                    location=location,
                ),
                Evidence(
                    ranks=RankSet(guards),
                    summary=f"wrote {made.path}",
                    location=user_location(made.site.frames),
                    values={"guard": guard.text},
                ),
            ),
        )
