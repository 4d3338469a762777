"""DIA001: a part of distdiag that judges the run failed and was switched off."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, message_of, shortened
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class Crash(View):
    """An exception that a check or an aligner raised, with its traceback.

    `part` is what it is and its name: ``check COL003``, ``aligner ModelAligner``.
    """

    is_of_one_rank: ClassVar[bool] = True

    part: str
    error: Exception
    traceback: str


class CrashedCheck(Check[Crash]):
    """A check of distdiag, or an aligner that feeds checks, failed and was switched off.

    ## What you see
    From here on the check finds nothing, which does not mean that nothing is wrong. The check
    raised an exception of its own; this says nothing about your training. If an aligner failed (it
    puts the events of ranks side by side), all checks that use it find nothing more.

    ## Example
        # wrong: a check of a third party trusts every call to have sizes
        rows = call.signature.input_sizes[0][0]

        # right
        rows = call.signature.input_sizes[0][0] if call.signature.input_sizes else 0

    ## How to fix
    Report the traceback to the author of the check, or to distdiag if an aligner failed. Until
    then, pass `--ignore` with the codes that are not checked.

    Changes: The codes are listed as not checked.

    Leaves: What the checks would have found stays unknown for this run.

    ## When it is not a defect
    The report lists all codes as checked.

    To silence it, set `ignore = ["DIA001"]` in `distdiag.toml`.

    ## References
    - https://packaging.python.org/en/latest/specifications/entry-points/
    """

    code = "DIA001"
    name = "crashed-check"
    severity = Severity.WARNING

    def check(self, view: Crash) -> Iterator[Finding]:
        """Report it."""
        summary = f"{type(view.error).__name__}: {message_of(view.error)}"
        yield self.finding(
            f"{view.part} failed and was switched off: {summary}",
            ranks=RankSet(),
            subjects=(view.part.split()[-1],),
            confidence=1.0,
            evidence=(
                Evidence(
                    ranks=RankSet(),
                    summary=summary,
                    values={"traceback": shortened(view.traceback, LONGEST_TRACEBACK)},
                ),
            ),
        )
