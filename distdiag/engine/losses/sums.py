"""Shows which gradients ranks apply as they are while they sum those of other parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from distdiag.engine.collectives.traffic import Surplus, element_bytes
from distdiag.engine.losses.feeds import Feeds
from distdiag.events.models import ReplicaEvidence, TensorPlan
from distdiag.views.contributions import Contribution, are_equal, weights_in
from distdiag.views.experts import is_of_expert
from distdiag.views.gradients import GradientSample, Ranks, Sum, SumsView

FIRST_STEPS: Final = 3
FEWEST_STEPS: Final = 4
"""In a run that is over after fewer steps nothing can be known to be never summed."""

_WITHOUT_GROUP: Final = (ReplicaEvidence.WORLD, ReplicaEvidence.REDUCED, ReplicaEvidence.SENT)


@dataclass(slots=True)
class KnownModel:
    """What is known of one model; `plans` by rank."""

    samples: tuple[GradientSample, ...] = ()
    found: list[Contribution] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    plans: dict[int, dict[str, TensorPlan]] = field(default_factory=dict)


def sums_views(model: str, known: KnownModel, surplus: Surplus, feeds: Feeds) -> Iterator[SumsView]:
    """Yield one view for each set of ranks that sum most of their gradients."""
    for ranks in sorted({group for each in known.found for group in _summing(each)}):
        yield _view(model, ranks, known, surplus, feeds)


def _summing(found: Contribution) -> Iterator[Ranks]:
    """Yield the ranks whose gradients are summed, if those that apply the sum belong to them."""
    used = {rank for s in found.vector if not found.is_nothing(s) for rank in s.ranks}
    if len(used) > 1 and set(found.ranks) <= used and not found.is_sharded:
        yield tuple(sorted(used))


def _view(model: str, ranks: Ranks, known: KnownModel, surplus: Surplus, feeds: Feeds) -> SumsView:
    first = known.samples[0].by_rank
    weights = [
        weights_in({rank: sample.by_rank[rank] for rank in ranks})
        for sample in known.samples
        if sample.by_rank.keys() >= set(ranks)
    ]
    held = [known.plans.get(rank, {}) for rank in ranks]
    whole = {name for name, each in weights[0].items() if len(each) == len(ranks)}
    copies = {name for name in whole if are_equal(weights[0][name]) and _has_one_owner(name, held)}
    plans = {name: held[0][name] for name in sorted(copies)}
    steps = dict.fromkeys(each.step for each in known.found)
    sums = {name: tuple(_sums(known.found, steps, ranks, name)) for name in plans}
    drifted = frozenset(name for name in plans if _drifts(name, weights[1:]))
    sizes = {each.name: each.num_elements for each in first[ranks[0]].gradients}
    size = sum(sizes[name] * element_bytes(plans[name].dtype) for name in drifted)
    return SumsView(
        model,
        ranks,
        plans,
        sums,
        drifted,
        known.samples[0].step,
        first[ranks[0]].site,
        any(
            not are_equal(weights[0][name]) and not is_of_expert(held[0][name])
            for name in whole & held[0].keys()
        ),
        2 * surplus.between(frozenset(ranks)) >= size,
        feeds.are_parts_of_one(ranks),
    )


def _has_one_owner(name: str, held: Sequence[Mapping[str, TensorPlan]]) -> bool:
    """Say whether the same optimizers hold a parameter, and nothing tells who has copies."""
    plans = [each[name] for each in held if name in each]
    owners = {plan.owners for plan in plans}
    is_free = all(plan.evidence in _WITHOUT_GROUP and not plan.tied_to for plan in plans)
    return len(plans) == len(held) and is_free and len(owners) == 1 and owners != {()}


def _drifts(name: str, later: Sequence[Mapping[str, Sequence[float]]]) -> bool:
    found = [weights.get(name, ()) for weights in later]
    return bool(found) and all(len(each) > 1 and len(set(each)) == len(each) for each in found)


def _sums(
    found: Sequence[Contribution], steps: Mapping[int, None], ranks: Ranks, name: str
) -> Iterator[Sum]:
    """Yield what is done with a gradient, for each step that has one on all ranks."""
    for step in steps:
        mine = [each for each in found if each.step == step and set(each.ranks) <= set(ranks)]
        kinds = {kind for each in mine for kind in [_kind(each, name)] if kind is not None}
        if kinds and {rank for each in mine for rank in each.ranks} == set(ranks):
            yield kinds.pop() if len(kinds) == 1 else Sum.OTHER


def _kind(found: Contribution, name: str) -> Sum | None:
    if name in found.names:
        return Sum.SUMMED
    outlier = next((each for each in found.outliers if each.name == name), None)
    if outlier is None:
        return None
    if (outlier.giver,) == found.ranks:
        return Sum.OWN
    return Sum.SUMMED if outlier.factor is not None else Sum.OTHER
