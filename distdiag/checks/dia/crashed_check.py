"""DIA001: a check of distdiag failed and was switched off."""

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
    """A check of distdiag failed and was switched off.

    ## What you see
    The check raised an exception of its own; this says nothing about the training. From here on the
    check finds nothing, which does not mean that nothing is wrong.

    ## Example
        # wrong: a check of a third party trusts every call to have sizes
        rows = call.signature.input_sizes[0][0]

        # right
        rows = call.signature.input_sizes[0][0] if call.signature.input_sizes else 0

    ## How to fix
    Report the traceback to the author of the check; until then, pass `--ignore` with its code.

    Changes: The code is listed as not checked.

    Leaves: What the check would have found stays unknown for this run.

    ## When it is not a defect
    The report lists the code as checked.

    To silence it, set `ignore = ["DIA001"]` in `distdiag.toml`.

    ## References
    - https://packaging.python.org/en/latest/specifications/entry-points/
    """

    code = "DIA001"
    name = "crashed-check"
    severity = Severity.WARNING

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
