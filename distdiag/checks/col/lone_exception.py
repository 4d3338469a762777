"""COL014: a rank has caught an exception that no other rank had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distdiag.checks.base import Check
from distdiag.events.lifecycle import BrokenPass
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class BrokenPassView(View):
    """Ranks whose pass an exception has ended in one step, and that went on; others had none."""

    by_rank: Mapping[int, BrokenPass]
    others: RankSet


class LoneException(Check[BrokenPassView]):
    """A rank has caught an exception of a pass that no other rank had, and went on.

    ## What you see
    The run hangs later, or numbers are wrong from some step on: the rank that has caught the
    exception leaves out the collectives of that pass, and its next ones meet those of the others.

    ## Example
        try:
            loss = train_step(batch)         # wrong: the others wait in its all-reduce
        except RuntimeError:
            continue
        # right: all ranks know of it, and skip the step together
        dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)

    ## How to fix
    Let the exception end the process, so that the launcher ends the others. Or catch it where no
    collective was left out, and all_reduce a flag by which all ranks skip the rest of the step.

    Changes: What the other ranks do when one of them fails.

    Leaves: The cause of the exception itself.

    ## When it is not a defect
    The ranks skip the step together, or the pass has no collectives. So it is always a note; what
    comes of it has findings of its own.

    If so, add `ignore = ["COL014"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/elastic/errors.html
    """

    code = "COL014"
    name = "lone-exception"
    severity = Severity.WARNING

    def check(self, view: BrokenPassView) -> Iterator[Finding]:
        """Say where it was raised."""
        ranks = RankSet(view.by_rank)
        first = view.by_rank[min(ranks)]
        kind = first.type or "an exception"
        yield self.finding(
            f"{ranks.phrase()} caught {kind} that ended a {first.what} in step {first.step}, and "
            f"went on; {view.others.phrase()} had none",
            ranks=ranks,
            step=first.step,
            location=user_location(first.frames) or user_location(first.site.frames),
            grade=Grade.NOTE,
            confidence=0.5,
            evidence=tuple(_evidence(rank, each) for rank, each in sorted(view.by_rank.items())),
        )


def _evidence(rank: int, event: BrokenPass) -> Evidence:
    line = event.message.partition("\n")[0]
    raised = f"{event.type}: {line}" if event.type else "something that is not known"
    return Evidence(
        ranks=RankSet([rank]),
        summary=f"its {event.what} raised {raised}",
        location=user_location(event.site.frames),
    )
