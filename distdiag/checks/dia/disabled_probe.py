"""DIA003: a probe could not observe and was switched off."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, shortened


class DisabledProbe(Check[ProbeDisabled]):
    """A probe could not observe and was switched off.

    ## What it detects
    A probe of the tool that raised an exception, or found that it cannot work here. Training goes
    on without it.

    ## Why it matters
    What the probe would have seen is missing from the records, so checks that rest on it say at
    most a note about that rank.

    ## Example
    The disk of the run directory is full.

    ## How to fix
    Read the reason in the evidence. A full disk or a missing permission is yours to free; a
    traceback inside the tool is a defect to report.

    ## References
    - `distdiag doctor`
    """

    code = "DIA003"
    name = "disabled-probe"
    severity = Severity.INFO

    why = "The probe switched itself off rather than disturb the training."
    fix = "Remove the reason that the evidence names, or report the traceback if it is the tool's."
    fix_changes = "The checks that rest on this probe judge the rank again."
    fix_leaves = "What the probe missed in this run stays unknown."
    disproof = "Later records of the rank come from this probe."

    def check(self, event: ProbeDisabled) -> Iterator[Finding]:
        """Pass on what the rank said about its probe."""
        ranks = RankSet([event.rank])
        yield self.finding(
            f"probe {event.probe} of rank {event.rank} was switched off: {event.reason}",
            ranks=ranks,
            step=event.step,
            subjects=(event.probe,),
            confidence=1.0,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=event.reason,
                    values={"traceback": shortened(event.traceback, LONGEST_TRACEBACK)}
                    if event.traceback
                    else {},
                ),
            ),
        )
