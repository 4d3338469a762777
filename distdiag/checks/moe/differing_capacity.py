"""MOE011: ranks that share experts give each expert a different number of places."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.exchanges import evidence_of, layer_of
from distdiag.findings.descriptions import call_location, call_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.routing import Exchange, UnfitExchange


class DifferingCapacity(Check[UnfitExchange]):
    """Ranks that share experts give each expert a different number of places.

    ## What it detects
    An exchange of tokens within a layer that routes in which every rank sends equally many rows to
    each rank, and not all ranks equally many: the capacity of the experts is not the same. It is
    said before the exchange is over. Ranks that tell each other first how many rows will come
    (splits that fit) are left alone.

    ## Why it matters
    The exchange trusts the sizes: it hangs, aborts, or puts tokens into the places of other ones.

    ## Example
    The capacity is the local maximum of tokens for an expert, or is computed from the local number
    of tokens, which differs from rank to rank; the ranks do not agree on it where no token is to be
    dropped, or only in training and not in evaluation.

    ## How to fix
    Agree on the maximum with an `all_reduce` (`MAX`) over the ranks that share the experts before
    the buffers are made, or pad all ranks to one number of tokens.

    ## References
    - `torch.distributed.all_to_all_single`: without splits all ranks must pass equal sizes
    """

    code = "MOE011"
    name = "differing-capacity"
    severity = Severity.ERROR

    why = "Without splits each rank takes it that all others send as many rows as it does itself."
    fix = "Reduce the capacity with MAX over the expert-parallel group, then make the buffers."
    fix_changes = "One small all-reduce for each layer, and a larger buffer on some ranks."
    fix_leaves = "Why the ranks have different numbers of tokens."
    disproof = "The recorded sizes of this exchange are the same on all ranks."

    def check(self, view: UnfitExchange) -> Iterator[Finding]:
        """Compare how many rows each rank sends to every other."""
        if not view.is_even:
            return
        first = view.any_exchange
        parts = ", ".join(f"{_places(part)} on rank {r}" for r, part in view.by_rank.items())
        yield self.finding(
            f"the capacity of the experts of {layer_of(first)} differs between the ranks that "
            f"exchange tokens by {call_phrase(first.call)}: {parts}",
            ranks=view.ranks,
            step=first.event.step,
            location=call_location(first.call),
            subjects=tuple(dict.fromkeys(p.event.layer for p in view.by_rank.values())),
            grade=Grade.PROVEN,
            evidence=evidence_of(view),
        )


def _places(part: Exchange) -> str:
    capacity = part.event.capacity
    said = f" ({capacity} for each expert)" if capacity else ""
    return f"{part.even_share} rows to each rank{said}"
