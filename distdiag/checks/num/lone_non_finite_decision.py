"""NUM003: some ranks act on a NaN or infinity of their own, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.num.places import place_phrase, subject_of, value_phrase
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.numerics import LoneDecisionView, first_place


class LoneNonFiniteDecision(Check[LoneDecisionView]):
    """Some ranks act on a NaN or infinity that the others do not have.

    ## What you see
    The other ranks hang, or their collectives meet the wrong call. One rank raised, or skipped a
    step, because it had a NaN or infinity of its own, and no longer makes the calls that the other
    ranks wait for.

    ## Example
        if torch.isnan(loss):                             # wrong: only this rank raises
            raise ValueError("loss is NaN")

        bad = torch.isnan(loss).float()                   # right: all ranks decide alike
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            raise ValueError("loss is NaN")

    ## How to fix
    Let all ranks decide together: `bad = (~torch.isfinite(loss)).float()`,
    `dist.all_reduce(bad, op=dist.ReduceOp.MAX)`, and test `bad` on every rank.

    Changes: All ranks raise, or skip the same step.

    Leaves: The cause of the NaN or infinity: NUM001 names it.

    ## When it is not a defect
    The rank raised for another reason in the same step. Silence it by `ignore = ["NUM003"]` in
    `distdiag.toml`.

    ## References
    - https://github.com/ai2cm/ace/issues/850
    """

    code = "NUM003"
    name = "lone-non-finite-decision"
    severity = Severity.ERROR
    explains = ("HNG001", "HNG002", "COL001", "COL002", "COL003", "COL007", "COL009", "COL011")

    def check(self, view: LoneDecisionView) -> Iterator[Finding]:
        """Name who decided, by what number, and what they did."""
        ranks = RankSet(view.by_rank)
        event = view.by_rank[min(ranks)]
        place = first_place(event)
        error = view.raised.get(min(ranks))
        did = "raised" if error is not None else "went on without the step"
        frames = error.frames if error is not None else event.site.frames
        yield self.finding(
            f"{ranks.phrase()} {did} at step {event.step} over a {value_phrase(place)} that "
            f"{view.others.phrase()} {'does' if len(view.others) == 1 else 'do'} not have",
            ranks=ranks,
            step=event.step,
            location=user_location(frames),
            subjects=(subject_of(place),),
            evidence=(
                *(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"{value_phrase(first_place(each))}: "
                        f"{place_phrase(first_place(each))}",
                    )
                    for rank, each in sorted(view.by_rank.items())
                ),
                *(
                    Evidence(ranks=RankSet([rank]), summary=f"raised {each.type}: {each.message}")
                    for rank, each in sorted(view.raised.items())
                ),
            ),
            grade=Grade.LIKELY,
            confidence=0.9,
        )
