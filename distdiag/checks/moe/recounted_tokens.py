"""MOE008: activation checkpointing repeats a forward pass, which counts the same tokens again."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import mentions_halving
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import Recount, RepeatedRouting


class RecountedTokens(Check[RepeatedRouting]):
    """Activation checkpointing repeats a forward pass, which counts the same tokens again.

    ## What you see
    Statistics of how often experts are used are twice as large as they should be, and everything
    that is computed from them (a bias that balances the experts, a metric) is wrong. Activation
    checkpointing runs the forward pass a second time, and the second pass counts the same tokens
    again.

    ## Example
        # wrong: in the forward pass of a checkpointed layer
        self.tokens_per_expert += counts
        # right: outside, from what the layer returns
        hidden, counts = checkpoint(layer, hidden, use_reentrant=False)
        tokens_per_expert += counts

    ## How to fix
    Move the update of the buffer out of the checkpointed function. Or update it only in the first
    of the two passes.

    Changes: The statistics: they become half as large.

    Leaves: Values that were already computed from them.

    ## When it is not a defect
    The count is halved, or only compared with counts that are doubled as well.

    If so, add `ignore = ["MOE008"]` to `distdiag.toml`. It is a note where the source halves a
    count or takes its sign.

    ## References
    - https://docs.pytorch.org/docs/stable/checkpoint.html
    """

    code = "MOE008"
    name = "recounted-tokens"
    severity = Severity.WARNING

    def check(self, view: RepeatedRouting) -> Iterator[Finding]:
        """Report all counters as one finding."""
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
        f"passes, and by the repeated pass to a value that none of them had left",
        location=user_location(each.repeated.site.frames),
        values={"first": each.first[-1].after, "repeated": each.repeated.after},
    )
