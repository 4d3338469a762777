"""MOE014: two runs of one script with the same seed send tokens to different experts."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.routing_differences import (
    bin_label,
    cause_phrase,
    flip_phrase,
    flips_by_nature,
    nature_phrase,
    place_phrase,
)
from distdiag.events.comparisons import Nature, Origin, RoutingDifference
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity

_FIX = {
    Origin.DATA: "Seed the sampler's generator, the workers and whatever else makes the batches.",
    Origin.WEIGHTS: "Call `torch.manual_seed(seed)` before the model is created, or load the same "
    "checkpoint.",
    Origin.DRAW: "Seed the generator that the module draws from, on every rank.",
}


class UnreproducibleRouting(Check[RoutingDifference]):
    """Two runs of a script with the same seed send tokens to different experts.

    ## What you see
    The run cannot be repeated, and so not debugged: two runs with the same seed send tokens to
    different experts. If rounding decides the expert of a token, a repeated forward pass or a
    different rank may also choose a different one.

    ## Example
        # wrong: a generator that nobody seeds
        noise = torch.rand(scores.shape, generator=torch.Generator())
        # right
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(scores.shape, generator=generator)

    ## How to fix
    Call `torch.use_deterministic_algorithms(True)` and set `CUBLAS_WORKSPACE_CONFIG=:4096:8`. Or
    compute the scores in float32, so that fewer of them are nearly equal.

    Changes: How reproducible the run is; deterministic algorithms may be slower.

    Leaves: How the routers choose.

    ## When it is not a defect
    The router is intended to draw noise that is not seeded.

    If so, add `ignore = ["MOE014"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    """

    code = "MOE014"
    name = "unreproducible-routing"
    severity = Severity.WARNING

    def check(self, event: RoutingDifference) -> Iterator[Finding]:
        """Name the first token that is routed otherwise, and what led to it."""
        cause = event.cause
        what = (
            flip_phrase(event.flip, event.choice.dtype)
            if event.flip is not None
            else "different numbers of tokens in the two runs"
        )
        is_meant = cause.nature is Nature.MEANT
        yield self.finding(
            f"two runs route tokens differently from {place_phrase(event)} on: {what}; "
            f"{cause_phrase(cause)} ({nature_phrase(cause.nature)})",
            ranks=event.culprits,
            step=event.step,
            subjects=(event.layer,),
            grade=Grade.NOTE if is_meant else Grade.PROVEN,
            evidence=tuple(_evidence(event)),
            fix=_FIX.get(cause.origin, self.fix),
        )


def _evidence(event: RoutingDifference) -> Iterator[Evidence]:
    cause, ranks = event.cause, event.culprits
    first = f"{event.num_flipped} of {event.choice.num_tokens} tokens were flipped in that choice"
    yield Evidence(
        ranks=ranks,
        summary=f"{first}, {event.num_different} of {event.num_compared} choices differ",
    )
    by_rank = RankSet([cause.rank])
    where = f"step {cause.step}, micro-step {cause.micro}"
    yield Evidence(ranks=by_rank, summary=f"{where}: {cause_phrase(cause)}")
    for detail in cause.details:
        yield Evidence(ranks=by_rank, summary=detail)
    numeric, logic = flips_by_nature(event.margins)
    seen = [each for each in event.margins if each.num_tokens]
    tokens = {f"tokens: {bin_label(each)}": each.num_tokens for each in seen}
    flipped = {f"flipped: {bin_label(each)}": each.num_flipped for each in seen}
    yield Evidence(
        ranks=ranks,
        summary=f"rounding may explain {numeric} of the flips in step {event.step} by their "
        f"margins{f', but not {logic} more' if logic else ''}; flips in later steps follow from "
        "these",
        values={**tokens, **flipped},
    )
