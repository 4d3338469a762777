"""MOE002: ranks send the same tokens to different experts."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import boundary_phrase, choice_phrase, layer_names
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import Divergence, RoutingView


class DivergentRouting(Check[RoutingView]):
    """Ranks send the same tokens to different experts.

    ## What it detects
    Ranks whose layer was given the same tokens, to the last bit, choose different experts for them.
    Gates that draw random numbers are left alone. Where nothing tells that the ranks train one
    model, and the scores differ as well, it is a note.

    ## Why it matters
    Ranks that hold the same tokens (tensor or sequence parallel ones, or replicas) must choose
    alike: else each adds up the outputs of other experts, and counts of tokens do not fit.

    ## Example
    The weights or the bias of a router are not the same on all ranks; ties between scores are
    broken differently.

    ## How to fix
    Broadcast the router's parameters and buffers when the model is built and after loading; let one
    rank choose, or compute the scores in float32.

    ## References
    - `torch.topk`: the order of equal elements is not defined
    """

    code = "MOE002"
    name = "divergent-routing"
    severity = Severity.WARNING

    why = "Equal tokens, other experts: the routers of the ranks are not the same."
    fix = "Make weights, bias and buffers of the router equal on all ranks that share tokens."
    fix_changes = "Which experts the tokens of all ranks but one are sent to."
    fix_leaves = "What was trained with unequal routers."
    disproof = "The ranks are meant to train models of their own."

    def check(self, view: RoutingView) -> Iterator[Finding]:
        """Take all choices together that differ between ranks."""
        if not view.divergences:
            return
        wrong = view.divergences
        shown = next((each for each in wrong if each.has_equal_scores), wrong[0])
        first = next(iter(shown.by_rank.values()))
        ranks = RankSet(rank for each in wrong for rank in each.by_rank)
        scores = "with equal scores" if shown.has_equal_scores else "by other scores"
        layers = layer_names(event for each in wrong for event in each.by_rank.values())
        yield self.finding(
            f"{layers} of {view.model} sends the same tokens to different experts on "
            f"{ranks.phrase()}, {scores}: {len(wrong)} of {view.num_compared} choices "
            f"for the same tokens",
            ranks=ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=tuple(dict.fromkeys(e.layer for each in wrong for e in each.by_rank.values())),
            grade=_grade(shown),
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"step {event.step}, {event.layer}: {choice_phrase(event)}; "
                    f"{boundary_phrase(event)}",
                    location=user_location(event.site.frames),
                    values={"chosen": event.chosen, "scores": event.scores, "tokens": event.given},
                )
                for rank, event in shown.by_rank.items()
            ),
        )


def _grade(shown: Divergence) -> Grade:
    return Grade.LIKELY if shown.is_together or shown.has_equal_scores else Grade.NOTE
