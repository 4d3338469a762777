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
    Ranks that hold the same tokens (for example tensor-parallel ranks) add up the outputs of
    different experts, and their counts of tokens differ. The routers of these ranks are not equal,
    or order equal scores differently.

    ## Example
        # wrong: each rank draws its own router
        router = nn.Linear(dim, num_experts)
        # right
        router = nn.Linear(dim, num_experts)
        for tensor in router.parameters():
            dist.broadcast(tensor, src=0)

    ## How to fix
    Make weights, bias and buffers of the router equal on all ranks that share tokens
    (`dist.broadcast(p.data, src=0)`), and compute its scores in float32. Or let one rank choose the
    experts and broadcast the indices.

    Changes: The experts of the tokens on all ranks but one.

    Leaves: Weights that were trained with unequal routers.

    ## When it is not a defect
    Each rank is intended to train its own model.

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
        scores = "with equal scores" if shown.has_equal_scores else "by different scores"
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
