"""MOE002: ranks send the same tokens to different experts."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import boundary_phrase, choice_phrase, layer_names
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import Divergence, RoutingView


class DivergentRouting(Check[RoutingView]):
    """Ranks send the same tokens to different experts.

    ## What you see
    Ranks that hold the same tokens, such as tensor-parallel ones, add up the outputs of different
    experts, and counts of tokens do not match. The routers of these ranks are not the same, or
    break ties differently.

    ## Example
        # wrong: each rank draws its own router
        router = nn.Linear(dim, num_experts)
        # right
        router = nn.Linear(dim, num_experts)
        for tensor in router.parameters():
            dist.broadcast(tensor, src=0)

    ## How to fix
    Make weights, bias and buffers of the router equal on all ranks that share tokens, or let one
    rank choose; compute the scores in float32.

    Changes: Which experts the tokens of all ranks but one are sent to.

    Leaves: What was trained with unequal routers.

    ## When it is not a defect
    The ranks are meant to train models of their own.

    If so, add `ignore = ["MOE002"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.topk.html
    """

    code = "MOE002"
    name = "divergent-routing"
    severity = Severity.WARNING

    def check(self, view: RoutingView) -> Iterator[Finding]:
        """Report all choices that differ between ranks as one finding."""
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
