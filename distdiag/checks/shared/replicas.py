"""Which ranks hold the wrong content of a tensor, and how findings describe it."""

import math
from collections.abc import Sequence
from typing import Final

from distdiag.events.models import Content, ReplicaEvidence, TensorPlan, kept_ranks
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Grade, Location
from distdiag.views.models import ContentView, Disagreement, ModelView, ReplicaView, ScalingView

MOST_SHOWN: Final = 5
_WIDE: Final = ("float32", "float64", "bfloat16", "complex64", "complex128")
_HUGE: Final = 1e15
_MANY: Final = 0.5
_FEW: Final = 0.1
_SOME: Final = 0.05

_KNOWN_BY: Final = {
    ReplicaEvidence.MESH: "its mesh says that these ranks hold the same tensor",
    ReplicaEvidence.WRAPPER: "the wrapper should keep them the same",
    ReplicaEvidence.UNSYNCED: "DDP should keep them the same, but does not reduce every gradient",
    ReplicaEvidence.BYPASSED: "DDP should keep them the same, but its forward pass was not called",
    ReplicaEvidence.LONE: "DDP was given a group of one rank, so that it reduces nothing",
    ReplicaEvidence.REDUCED: "the program itself reduces the gradient over these ranks",
    ReplicaEvidence.SENT: "the program itself has sent the tensor to these ranks",
    ReplicaEvidence.MARKED: "other tensors of its model are marked as one rank's part, but this "
    "one is not",
    ReplicaEvidence.MODEL: "other tensors of the same model are sharded over these ranks",
    ReplicaEvidence.FROZEN: "the model is frozen and in no wrapper, and these ranks train "
    "another model together",
    ReplicaEvidence.OWN: "it is marked as one rank's own part",
    ReplicaEvidence.ROUTER: "the weight of its router is trained, and stays the same on these "
    "ranks",
    ReplicaEvidence.LAYER: "it is marked as one rank's own part, but routes to experts of all "
    "of these ranks and was the same at first; the rest of its layer is trained and stays the same",
    ReplicaEvidence.OTHER_GROUPS: "ranks of other groups of the same kind reduce their gradients",
    ReplicaEvidence.WORLD: "it is not known which ranks should hold the same tensor, so all are "
    "compared",
}


_INFERRED: Final = (
    ReplicaEvidence.FROZEN,
    ReplicaEvidence.MODEL,
    ReplicaEvidence.MARKED,
    ReplicaEvidence.LONE,
    ReplicaEvidence.ROUTER,
    ReplicaEvidence.LAYER,
)

NOT_REDUCED: Final = (ReplicaEvidence.WORLD, ReplicaEvidence.FROZEN, ReplicaEvidence.SENT)
"""Whether gradients are reduced over the ranks that hold such tensors is not known."""


def grade_of(view: ReplicaView, *, has_culprit: bool) -> Grade:
    """Say how sure it is that the ranks should hold the same."""
    # Stages of a pipeline are marked in the same way, and do not begin alike; nor do models that
    # ranks train for themselves.
    is_guess = (
        view.evidence in (ReplicaEvidence.MARKED, ReplicaEvidence.LONE) and view.alike_at is None
    )
    if view.num_unsynced_steps:
        return Grade.LIKELY
    if view.evidence in (ReplicaEvidence.WORLD, ReplicaEvidence.UNSYNCED) or is_guess:
        return Grade.NOTE
    return Grade.PROVEN if has_culprit and view.evidence not in _INFERRED else Grade.LIKELY


def is_garbage(plan: TensorPlan, content: Content) -> bool:
    """Say whether values look like memory that nobody has written, zeros aside."""
    if plan.dtype not in _WIDE or content.num_elements == 0:
        return False  # the small numbers of a narrow type may well be meant
    extremes = [abs(value) for value in (content.least, content.greatest) if math.isfinite(value)]
    is_huge = plan.is_parameter and any(value > _HUGE for value in extremes)
    return content.nan_share > 0 or content.subnormal_share > _SOME or is_huge


def is_untouched(plan: TensorPlan, content: Content) -> bool:
    """Say whether a parameter holds what `to_empty` left in it.

    Memory may hold one number all over before and after it was written.
    """
    is_same = bool(plan.emptied) and plan.emptied == content.digest
    return is_same and plan.is_parameter and content.least < content.greatest


def is_unwritten(plan: TensorPlan, content: Content) -> bool:
    """Say whether values look like memory that nobody has written, be it all zeros."""
    is_shared = plan.is_parameter or plan.evidence in (
        ReplicaEvidence.MESH,
        ReplicaEvidence.WRAPPER,
        ReplicaEvidence.MODEL,
    )
    is_zero = content.zero_share == 1.0 and content.num_elements > 1 and plan.dtype in _WIDE
    return (is_zero and is_shared) or is_garbage(plan, content)


def unwritten_ranks(tensors: Sequence[Disagreement]) -> RankSet:
    """Return the ranks some of whose tensors look unwritten while those of others do not.

    Biases begin with zeros, too: zeros are suspicious where most of what differs is zero.
    """
    bad: dict[int, list[Disagreement]] = {}
    for tensor in tensors:
        found = [r for r, content in tensor.by_rank.items() if is_unwritten(tensor.plan, content)]
        for rank in found if len(found) < len(tensor.by_rank) else ():
            bad.setdefault(rank, []).append(tensor)
    return RankSet(
        rank
        for rank, found in bad.items()
        if len(found) >= _MANY * len(tensors)
        or any(is_garbage(each.plan, each.by_rank[rank]) for each in found)
    )


def odd_ranks(tensors: Sequence[Disagreement]) -> tuple[RankSet, bool]:
    """Return the culprits, and whether they are a minority: without one all ranks are returned."""
    unwritten = unwritten_ranks(tensors)
    if unwritten:
        return unwritten, True
    groups = tensors[0].groups
    if len(groups[0]) > len(groups[1]):
        return RankSet(rank for group in groups[1:] for rank in group), True
    return RankSet(tensors[0].by_rank), False


def names_of(tensors: Sequence[Disagreement]) -> tuple[str, ...]:
    """Return the names of the tensors."""
    return tuple(tensor.plan.name for tensor in tensors)


def first_and_more(names: Sequence[str]) -> str:
    """Return ``layers.0.weight and 11 more``."""
    more = len(names) - 1
    return names[0] + (f" and {more} more" if more else "")


def figures(content: Content) -> str:
    """Describe the values of a tensor in a few words."""
    words = [
        f"mean {content.mean:.4g}",
        f"from {content.least:.4g} to {content.greatest:.4g}",
    ]
    for share, word in (
        (content.nan_share, "NaN"),
        (content.zero_share, "zero"),
        (content.subnormal_share, "subnormal"),
    ):
        if share > 0:
            words.append(f"{share:.0%} {word}")
    return ", ".join(words)


def evidence_of(view: ReplicaView, tensors: Sequence[Disagreement]) -> tuple[Evidence, ...]:
    """Return what each group of ranks holds, and why the ranks are compared."""
    lines = [
        Evidence(
            ranks=group,
            summary=f"{tensor.plan.name}: {figures(tensor.by_rank[min(group)])}",
            location=location_on(view, group),
            values={"digest": tensor.by_rank[min(group)].digest, "dtype": tensor.plan.dtype},
        )
        for tensor in tensors[:MOST_SHOWN]
        for group in tensor.groups
    ]
    why = (
        f"{len(tensors)} of {view.num_compared} tensors of {view.model} differ; "
        f"{_KNOWN_BY[view.evidence]}"
    )
    return (*lines, Evidence(ranks=view.ranks, summary=why))


def location_on(
    view: ReplicaView | ModelView | ContentView | ScalingView, ranks: RankSet
) -> Location | None:
    """Return where the first of these ranks was when its models were sampled."""
    sites = [view.sites[rank] for rank in ranks if rank in view.sites]
    sites += view.sites.values()
    return user_location(sites[0].frames) if sites else None


Suspects = dict[int, list[tuple[TensorPlan, Content]]]


def suspects_of(view: ContentView) -> Suspects:
    """Return, by rank, the tensors that look unwritten.

    Zeros are suspicious only on a rank most of whose parameters are, while other ranks have few.
    Of a flat parameter they are not: the piece of one rank may be biases and padding alone.
    `to_empty` may get the very memory in which the same weights were before: a parameter that is
    that of a rank which has not emptied it was sent from there.
    """
    written = {
        (plan.name, content.digest)
        for held in view.by_rank.values()
        for plan, content in held
        if not plan.emptied
    }
    garbage = {
        rank: [
            (plan, content)
            for plan, content in held
            if is_garbage(plan, content)
            or (is_untouched(plan, content) and (plan.name, content.digest) not in written)
        ]
        for rank, held in view.by_rank.items()
    }
    unwritten = {
        rank: [pair for pair in held if _is_counted(pair[0]) and is_unwritten(*pair)]
        for rank, held in view.by_rank.items()
    }
    shares = {
        rank: len(unwritten[rank]) / max(1, sum(_is_counted(plan) for plan, _ in held))
        for rank, held in view.by_rank.items()
    }
    plans = [plan for held in view.by_rank.values() for plan, _ in held]
    is_rare = bool(kept_ranks(plans)) and min(shares.values(), default=0.0) <= _FEW
    found = {
        rank: unwritten[rank] if is_rare and shares[rank] >= _MANY else garbage[rank]
        for rank in view.by_rank
    }
    return {rank: pairs for rank, pairs in found.items() if pairs}


def _is_counted(plan: TensorPlan) -> bool:
    return plan.is_parameter and not plan.is_flat_part
