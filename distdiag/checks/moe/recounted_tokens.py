"""MOE008: activation checkpointing repeats a forward pass, which counts the same tokens again."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import mentions_halving
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import Recount, RepeatedRouting


class RecountedTokens(Check[RepeatedRouting]):
    """Activation checkpointing repeats a forward pass, which counts the same tokens again.

    ## What it detects
    A module that routes tokens changes a buffer in its forward pass, and changes it once more when
    activation checkpointing repeats that pass: it ends otherwise than after any first pass. Where
    the file halves a count or takes its sign only, it is a note.

    ## Why it matters
    Statistics of how experts are used are twice what they should be, and what is computed from them
    (a bias that balances the experts, a metric) is wrong.

    ## Example
    `self.tokens_per_expert += counts` in the forward pass of a checkpointed layer.

    ## How to fix
    Count outside of what is checkpointed, for example from the indices that the layer returns, or
    only in the first of the two passes.

    ## References
    - `torch.utils.checkpoint.checkpoint`
    """

    code = "MOE008"
    name = "recounted-tokens"
    severity = Severity.WARNING

    why = "A forward pass with a side effect has it twice when it is repeated."
    fix = "Change the buffer outside of the checkpointed function."
    fix_changes = "The statistics, to half of what they were."
    fix_leaves = "What was computed from them until now."
    disproof = "The count is halved, or only compared with others that are doubled as well."

    def check(self, view: RepeatedRouting) -> Iterator[Finding]:
        """Take all counters together."""
        if not view.recounts:
            return
        wrong = view.recounts
        first = wrong[0].repeated
        ranks = RankSet(each.repeated.rank for each in wrong)
        names = tuple(dict.fromkeys(_name(each) for each in wrong))
        location = user_location(first.site.frames)
        is_meant = location is not None and mentions_halving(location.file)
        yield self.finding(
            f"{', '.join(names[:3])} of {view.model} is changed again when activation "
            f"checkpointing repeats the forward pass on {ranks.phrase()}",
            ranks=ranks,
            step=first.step,
            location=location,
            subjects=names,
            grade=Grade.NOTE if is_meant else Grade.LIKELY,
            confidence=0.8,
            evidence=tuple(_evidence(each) for each in wrong[:8]),
        )


def _name(each: Recount) -> str:
    return f"{each.repeated.layer}.{each.repeated.name}".lstrip(".")


def _evidence(each: Recount) -> Evidence:
    return Evidence(
        ranks=RankSet([each.repeated.rank]),
        summary=f"step {each.repeated.step}, {_name(each)}: changed by {len(each.first)} first "
        f"passes, and by a repeated one to what it was after none of them",
        location=user_location(each.repeated.site.frames),
        values={"first": each.first[-1].after, "repeated": each.repeated.after},
    )
