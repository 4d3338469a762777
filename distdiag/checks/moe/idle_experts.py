"""MOE007: some experts get no tokens, or one gets most of them."""

from __future__ import annotations

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

    ## What it detects
    In a layer that distributes at least 16 tokens for each expert, whenever it was looked at: an
    expert gets nothing, or one gets four times its even share, or more than one of a hundred
    choices is beyond the capacity of its expert.

    ## Why it matters
    Experts without tokens learn nothing; the rank with the busiest expert keeps the others waiting.

    ## Example
    The loss that balances the experts has no effect, or too small a coefficient.

    ## How to fix
    Look whether the auxiliary loss reaches the router's gradient and is scaled as intended.

    ## References
    - None: this is a matter of training, not of a library.
    """

    code = "MOE007"
    name = "idle-experts"
    severity = Severity.INFO

    why = "The router prefers few experts, and nothing holds against it."
    fix = "Check the coefficient and the gradient of the balancing loss."
    fix_changes = "The routing of all tokens."
    fix_leaves = "Experts that have learnt nothing so far."
    disproof = "Over more steps each expert gets its share."

    def check(self, view: RoutingView) -> Iterator[Finding]:
        """Look at the load of each layer over all looks."""
        looks: dict[tuple[str, int, int], list[Routing]] = {}
        for event in by_routers(view.choices):
            choice = event.choice
            is_ample = choice.num_tokens * choice.k >= _AMPLE * choice.num_experts
            if event.load is not None and is_ample:
                looks.setdefault((event.layer, event.number, event.rank), []).append(event)
        uneven = {key: events for key, events in looks.items() if _is_uneven(events)}
        if not uneven:
            return
        last = [events[-1] for events in uneven.values()]
        yield self.finding(
            f"{layer_names(last)} of {view.model} leaves experts without tokens or sends one "
            f"{_PEAK:.0f} times its share or more, or drops tokens{_shares(last)}, at each of the "
            f"steps that were looked at",
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
