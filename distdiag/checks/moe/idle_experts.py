"""MOE007: some experts get no tokens, or one gets most of them."""

from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.moe.routing import by_routers, choice_phrase, layer_names
from distdiag.events.ranks import RankSet
from distdiag.events.routing import Routing
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.routing import RoutingView

_AMPLE: Final = 16
_FEWEST: Final = 3
_PEAK: Final = 4.0
_DROPPED: Final = 0.01
_MOST_ROWS: Final = 16


class IdleExperts(Check[RoutingView]):
    """Some experts get no tokens, or one gets most of them.

    ## What you see
    Experts without tokens learn nothing, and the rank with the busiest expert keeps the other ranks
    waiting. The router prefers few experts, and nothing counteracts this.

    ## Example
        # wrong: the auxiliary loss is computed, but has no weight
        loss = token_loss
        # right
        loss = token_loss + 0.01 * aux_loss

    ## How to fix
    Add the auxiliary (load-balancing) loss to the loss with a coefficient that is large enough
    (`loss = loss + 0.01 * aux_loss`), and check that the router's weight gets a gradient from it.

    Changes: The routing of all tokens.

    Leaves: Experts that have learnt nothing so far.

    ## When it is not a defect
    Over more steps each expert gets its share, or the experts are intended to specialise.

    If so, add `ignore = ["MOE007"]` to `distdiag.toml`.

    ## References
    - https://arxiv.org/abs/2101.03961
    """

    code = "MOE007"
    name = "idle-experts"
    severity = Severity.INFO

    def check(self, view: RoutingView) -> Iterator[Finding]:
        """Judge the load of each layer over all sampled steps."""
        samples: dict[tuple[str, int, int], list[Routing]] = {}
        for event in by_routers(view.choices):
            choice = event.choice
            is_ample = choice.num_tokens * choice.k >= _AMPLE * choice.num_experts
            if event.load is not None and is_ample:
                samples.setdefault((event.layer, event.number, event.rank), []).append(event)
        uneven = {key: events for key, events in samples.items() if _is_uneven(events)}
        if not uneven:
            return
        last = [events[-1] for events in uneven.values()]
        yield self.finding(
            f"{layer_names(last)} of {view.model} leaves experts without tokens or sends one "
            f"{_PEAK:.0f} times its share or more, or drops tokens{_shares(last)}, at each of the "
            f"sampled steps",
            ranks=RankSet(event.rank for event in last),
            step=last[0].step,
            location=user_location(last[0].site.frames),
            subjects=tuple(dict.fromkeys(event.layer for event in last)),
            grade=Grade.NOTE,
            confidence=0.6,
            evidence=tuple(map(_row, last[:_MOST_ROWS])),
        )


def _is_uneven(events: list[Routing]) -> bool:
    loads = [event.load for event in events if event.load is not None]
    is_idle = all(load.idle_share > 0 for load in loads)
    drops = all(load.dropped_share > _DROPPED for load in loads)
    return len(loads) >= _FEWEST and (is_idle or drops or all(load.peak >= _PEAK for load in loads))


def _shares(events: Sequence[Routing]) -> str:
    """Return `` (up to 12% of the choices)`` if some are dropped."""
    most = max(event.load.dropped_share for event in events if event.load is not None)
    return f" (up to {most:.0%} of the choices)" if most > _DROPPED else ""


def _row(event: Routing) -> Evidence:
    assert event.load is not None
    dropped = event.load.dropped_share
    drops = f"{dropped:.0%} of the choices are dropped, " if dropped >= 0 else ""
    return Evidence(
        ranks=RankSet([event.rank]),
        summary=f"step {event.step}, {event.layer}: {event.load.idle_share:.0%} of the experts "
        f"get nothing, one gets {event.load.peak:.1f} times its share; {drops}"
        f"{choice_phrase(event)}",
        values={
            "idle_share": event.load.idle_share,
            "peak": event.load.peak,
            **({"dropped_share": dropped} if dropped >= 0 else {}),
        },
    )
