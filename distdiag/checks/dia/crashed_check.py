"""DIA001: a check of the tool itself failed and was switched off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, shortened
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class Crash(View):
    """An exception that a check raised, with its traceback."""

    is_of_one_rank: ClassVar[bool] = True

    code: str
    error: Exception
    traceback: str


class CrashedCheck(Check[Crash]):
    """A check of the tool itself failed and was switched off.

    ## What it detects
    An exception inside a check. The engine builds this finding; training is not touched.

    ## Why it matters
    From here on that check finds nothing, which must not read as "nothing is wrong".

    ## Example
    A check of a third party meets a record that it did not expect.

    ## How to fix
    Report the traceback to the author of the check, and ignore the check with `--ignore CODE`
    until it is repaired.

    ## References
    - `distdiag list`: the checks and where they come from
    """

    code = "DIA001"
    name = "crashed-check"
    severity = Severity.WARNING

    why = "The check raised an exception of its own; this says nothing about the training."
    fix = "Report the traceback to the author of the check; until then, --ignore its code."
    fix_changes = "The code is listed as not checked."
    fix_leaves = "What the check would have found stays unknown for this run."
    disproof = "The report lists the code as checked."

    def check(self, view: Crash) -> Iterator[Finding]:
        """Report it."""
        summary = f"{type(view.error).__name__}: {view.error}"
        yield self.finding(
            f"check {view.code} failed and was switched off: {summary}",
            ranks=RankSet(),
            subjects=(view.code,),
            confidence=1.0,
            evidence=(
                Evidence(
                    ranks=RankSet(),
                    summary=summary,
                    values={"traceback": shortened(view.traceback, LONGEST_TRACEBACK)},
                ),
            ),
        )
