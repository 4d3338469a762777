"""MOE011: ranks that share experts give each expert a different number of places."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.exchanges import evidence_of, layer_of
from distdiag.findings.descriptions import call_location, call_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.routing import Exchange, UnfitExchange


class DifferingCapacity(Check[UnfitExchange]):
    """Ranks that share experts give each expert a different number of places.

    ## What you see
    The all-to-all hangs, aborts, or puts tokens into wrong places. Without splits each rank expects
    every other rank to send as many rows as it sends itself, but the ranks have different
    capacities.

    ## Example
        # wrong: each rank counts its own tokens
        capacity = tokens_per_expert.max()
        # right
        capacity = tokens_per_expert.max()
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=ep_group)
        buffers = hidden.new_zeros(num_experts, int(capacity), dim)

    ## How to fix
    Before the buffers are created, reduce the capacity over the ranks that share the experts:
    `dist.all_reduce(capacity, op=dist.ReduceOp.MAX)`. Or pad all ranks to the same number of
    tokens.

    Changes: One small all-reduce for each layer, and a larger buffer on some ranks.

    Leaves: The reason why the ranks have different numbers of tokens.

    ## When it is not a defect
    The sizes of this all-to-all in the evidence are the same on all ranks.

    If so, add `ignore = ["MOE011"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single
    """

    code = "MOE011"
    name = "differing-capacity"
    severity = Severity.ERROR

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
