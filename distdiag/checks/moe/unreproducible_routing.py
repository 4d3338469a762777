"""MOE014: two runs of one script with the same seed send tokens to different experts."""

from __future__ import annotations

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
    Origin.WEIGHTS: "Seed torch before the model is made, or load the same checkpoint.",
    Origin.DRAW: "Seed the generator that the module draws from, on every rank.",
}
_FIX_NUMERIC = (
    "Call torch.use_deterministic_algorithms(True) and set CUBLAS_WORKSPACE_CONFIG, or keep the "
    "router and what leads to it in an order of additions that does not change."
)


class UnreproducibleRouting(Check[RoutingDifference]):
    """Two runs of a script with the same seed send tokens to different experts.

    ## What it detects
    `distdiag moe-determinism` runs the script twice and records every choice of experts. At one
    step a router sends a token elsewhere than in the other run, and before that it did not. What
    differs first is named: data, weights, random numbers, or a module that was given the same.

    ## Why it matters
    A run that cannot be repeated cannot be debugged, and where rounding decides the route, a
    repeated forward pass or another rank may take another one.

    ## Example
    A gate whose noise comes from a generator that nobody seeds; an index_add on a GPU in front of
    a router with nearly equal scores; a sampler shuffled without a seed.

    ## How to fix
    Seed what draws. If rounding decides: ask torch for deterministic algorithms, or compute the
    scores in float32 so that fewer of them are nearly equal.

    ## References
    - torch.use_deterministic_algorithms
    """

    code = "MOE014"
    name = "unreproducible-routing"
    severity = Severity.WARNING

    why = "The same data, weights and random numbers in the same order choose the same experts."
    fix = _FIX_NUMERIC
    fix_changes = "How reproducible the run is; deterministic algorithms may be slower."
    fix_leaves = "How the routers choose."
    disproof = "Two runs whose recorded choices agree at this place."

    def check(self, event: RoutingDifference) -> Iterator[Finding]:
        """Name the first token that is routed otherwise, and what led to it."""
        cause = event.cause
        what = (
            flip_phrase(event.flip, event.choice.dtype)
            if event.flip is not None
            else "other numbers of tokens in both runs"
        )
        is_meant = cause.nature is Nature.MEANT
        yield self.finding(
            f"two runs route differently from {place_phrase(event)} on: {what}; "
            f"{cause_phrase(cause)} ({nature_phrase(cause.nature)})",
            ranks=event.culprits,
            step=event.step,
            subjects=(event.layer,),
            grade=Grade.NOTE if is_meant else Grade.PROVEN,
            evidence=tuple(_evidence(event)),
            fix=_FIX.get(cause.origin, _FIX_NUMERIC),
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
        summary=f"of the flips in step {event.step} rounding may explain {numeric} by their "
        f"margins, and {logic} not; those of later steps follow from them",
        values={**tokens, **flipped},
    )
