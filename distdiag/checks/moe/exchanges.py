"""How findings describe the all-to-all that sends tokens to experts."""

from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import call_location, sizes_phrase
from distdiag.findings.finding import Evidence
from distdiag.views.invariants import Transfer, uneven_transfers
from distdiag.views.routing import Exchange, UnfitExchange, shares_of, width


def unfit_rows(view: UnfitExchange) -> tuple[Transfer, ...]:
    """Return what is sent and not expected so, counted in rows."""
    each = width(view.any_exchange.call.signature) or 1
    return tuple(
        Transfer(t.source, t.target, t.sent // each, t.expected // each)
        for t in uneven_transfers(view.calls)
    )


def layer_of(exchange: Exchange) -> str:
    """Return how the layer is called in a sentence."""
    event = exchange.event
    return f"{event.layer or 'the model itself'} of {event.model}"


def routing_phrase(exchange: Exchange) -> str:
    """Say what the layer had chosen before it sent the tokens."""
    event = exchange.event
    capacity = f", at most {event.capacity} for each expert" if event.capacity else ""
    return (
        f"{event.num_tokens} tokens, {event.k} of {event.num_experts} experts each{capacity}; "
        f"rows for the ranks of the group: {list(shares_of(exchange.call))}"
    )


def evidence_of(view: UnfitExchange) -> tuple[Evidence, ...]:
    """Return a row for each rank."""
    return tuple(
        Evidence(
            ranks=RankSet([rank]),
            summary=f"{routing_phrase(part)}; {sizes_phrase(part.call)}",
            location=call_location(part.call),
            values={"capacity": part.event.capacity, "num_tokens": part.event.num_tokens},
        )
        for rank, part in view.by_rank.items()
    )
