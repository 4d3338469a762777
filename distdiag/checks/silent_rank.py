"""DIA002: nothing was ever heard of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.alignment import Fate, RankState
from distdiag.checks.base import Check
from distdiag.event import RankStarted
from distdiag.finding import Evidence, Finding, Severity
from distdiag.ranks import RankSet


class SilentRank(Check):
    """Nothing was ever heard of a rank.

    ## What it detects
    At the end of a run, ranks of the job that wrote no event at all.

    ## Why it matters
    Whatever those ranks did is not in the report, and what was compared leaves them out.

    ## Example
    Two of three nodes were started through the tool, the third one was not; or the run directory of
    a node was lost.

    ## How to fix
    Start every rank through the tool, with one run directory that each node can write to.

    ## References
    - `distdiag doctor`
    """

    code = "DIA002"
    name = "silent-rank"
    severity = Severity.WARNING
    needs = (RankStarted,)

    why = "A rank without records was not observed; the other ranks were compared without it."
    fix = "Start the script through the tool on every rank, with a run directory it can write to."
    fix_changes = "The rank is compared with the others."
    fix_leaves = "What happened on the rank in this run stays unknown."
    disproof = "The run directory holds an event file of the rank."

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Name the silent ranks once no rank runs any more."""
        # Why a rank has no agent DIA003 says.
        silent = RankSet(
            s.rank
            for s in states.values()
            if s.fate is Fate.SILENT and not s.incomplete.startswith("agent: ")
        )
        if not silent or any(state.fate is Fate.RUNNING for state in states.values()):
            return
        yield self.finding(
            f"no event of {silent.phrase()} was ever read",
            ranks=silent,
            confidence=1.0,
            evidence=(Evidence(ranks=silent, summary="no event file, or an empty one"),),
        )
