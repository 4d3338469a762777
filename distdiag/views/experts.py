"""Which parameters are those of experts, and how many experts there should be."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from distdiag.events.models import Content, ReplicaEvidence, TensorPlan

_LIST: Final = re.compile(
    r"^(?:(?P<layer>.+?)\.)?(?:experts\.)?(?:local_)?experts\.(?P<index>\d+)\.(?P<rest>.+)$"
)
_STACK: Final = re.compile(r"^(?:(?P<layer>.+)\.)?(?:local_)?experts\.(?P<rest>[A-Za-z_].*)$")
_SINGLE: Final = re.compile(r"^(?:(?P<layer>.+)\.)?(?:local_)?expert\.(?P<rest>.+)$")
_ROUTER: Final = re.compile(r"^(?:(?P<layer>.+)\.)?(?:gate|router|wg|gating)(?:\.\w+)*\.weight$")
_STACKED_DIMS: Final = 3

Held = Mapping[int, Sequence[tuple[TensorPlan, Content]]]


@dataclass(slots=True)
class Experts:
    """One parameter of all experts of a layer, as the ranks hold it.

    `digests` are, for each rank, those of its experts, or one of all of them if they are stacked;
    `num_local` experts are on a rank, `num_total` does the router know.
    """

    layer: str
    parameter: str
    num_total: int
    num_local: int = 0
    is_stacked: bool = False
    digests: dict[int, list[str]] = field(default_factory=dict)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    """What is known of who holds copies: groups of ranks, or single ones."""


def experts_in(by_rank: Held) -> Iterator[Experts]:
    """Yield what can be compared; constants (biases of zero) tell nothing."""
    totals = _totals(by_rank)
    found: dict[tuple[str, str], Experts] = {}
    for rank, held in by_rank.items():
        for plan, content in held:
            place = _place(plan)
            if place is None or place[0] not in totals or not content.least < content.greatest:
                continue
            layer, rest, stacked = place
            experts = found.setdefault((layer, rest), Experts(layer, rest, totals[layer]))
            experts.is_stacked = bool(stacked)
            experts.digests.setdefault(rank, []).append(content.digest)
            experts.num_local = max(experts.num_local, stacked or len(experts.digests[rank]))
            is_known = plan.evidence is not ReplicaEvidence.WORLD and rank in plan.replicas
            experts.groups.add(plan.replicas if is_known else (rank,))
    yield from found.values()


def routers_in(plans: Sequence[TensorPlan]) -> frozenset[str]:
    """Return the names of the routers that have experts beside them in their layer."""
    names = [plan.name for plan in plans]
    places = [_place(plan) for plan in plans]
    layers = {place[0] for place in places if place is not None}
    matches = [_ROUTER.match(name) for name in names]
    return frozenset(
        match.string for match in matches if match is not None and (match["layer"] or "") in layers
    )


def spreading_routers(plans: Sequence[TensorPlan]) -> frozenset[str]:
    """Return the names of the routers that know more experts than this rank has in their layer."""
    held: dict[str, set[str | int]] = {}
    for plan in plans:
        match = _LIST.match(plan.name)
        place = _place(plan)
        if match is not None:
            held.setdefault(match["layer"] or "", set()).add(match["index"])
        elif place is not None:
            held.setdefault(place[0], set()).update(range(place[2] or 1))
    return frozenset(
        name
        for name in routers_in(plans)
        for plan in plans
        if plan.name == name and len(plan.shape) == 2 and plan.shape[0] > len(held[layer_of(name)])
    )


def layer_of(router: str) -> str:
    """Return the name of the layer that a router belongs to."""
    match = _ROUTER.match(router)
    return (match["layer"] or "") if match is not None else ""


def is_of_expert(plan: TensorPlan) -> bool:
    """Say whether a parameter belongs to an expert, by its name."""
    return _place(plan) is not None


def _totals(by_rank: Held) -> dict[str, int]:
    totals: dict[str, set[int]] = {}
    for held in by_rank.values():
        for plan, _ in held:
            match = _ROUTER.match(plan.name)
            if match is not None and len(plan.shape) == 2 and "expert" not in plan.name:
                totals.setdefault(match["layer"] or "", set()).add(plan.shape[0])
    return {layer: sizes.pop() for layer, sizes in totals.items() if len(sizes) == 1}


def _place(plan: TensorPlan) -> tuple[str, str, int] | None:
    """Return the layer, the name within an expert, and how many are stacked in one tensor."""
    if not plan.is_parameter:
        return None
    for pattern in (_LIST, _SINGLE):
        match = pattern.match(plan.name)
        if match is not None:
            return match["layer"] or "", match["rest"], 0
    match = _STACK.match(plan.name)
    if match is not None and len(plan.shape) == _STACKED_DIMS:
        return match["layer"] or "", match["rest"], plan.shape[0]
    return None
