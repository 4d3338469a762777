"""What optimizers hold and never got a gradient for, over all samples at their steps."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from distdiag.engine.bounded import MOST_FOLLOWED, Forgotten, SinceFirst
from distdiag.events.base import CallSite
from distdiag.events.models import MOST_NAMES, OptimizerState, ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.views.models import UntrainedView

FEWEST_SAMPLES: Final = 2
_COPIES: Final = (ReplicaEvidence.MESH, ReplicaEvidence.WRAPPER, ReplicaEvidence.REDUCED)
_UNKNOWN: Final = (-1,)
_LEAVE_OUT: Final = ("FSDP1", "ZeRO")
"""Wrappers whose ranks may have gradients of parts only, or keep them elsewhere."""


@dataclass(slots=True)
class _Seen:
    never: dict[str, None]
    at_times: set[str]
    site: CallSite
    members: tuple[int, ...]
    num_samples: int = 1

    def add(self, state: OptimizerState) -> None:
        lacking = dict.fromkeys(state.without_gradient)
        self.never = {name: None for name in self.never if name in lacking}
        self.at_times.update(lacking)
        self.members = state.members
        self.num_samples += 1


class Untrained:
    """Collect the samples; what never had a gradient is known at the end."""

    def __init__(self, forgotten: Forgotten | None = None) -> None:
        """Begin with none; `forgotten` is told of optimizers that are too many."""
        self._seen: SinceFirst[str, dict[int, _Seen]]
        self._seen = SinceFirst(MOST_FOLLOWED, "optimizers", forgotten)

    def add(self, state: OptimizerState) -> None:
        """Take in a sample, if some of the parameters had a gradient that the others could have."""
        is_idle = state.num_without_gradient == state.num_parameters or not state.num_backwards
        if is_idle or state.num_foreign:
            return
        ranks = self._seen.find(state.optimizer, dict)
        if ranks is None:
            return
        seen = ranks.get(state.rank)
        if seen is None:
            lacking = dict.fromkeys(state.without_gradient)
            ranks[state.rank] = _Seen(lacking, set(lacking), state.site, state.members)
        else:
            seen.add(state)

    def views(self, plans_of: Callable[[int], Iterable[TensorPlan]]) -> Iterator[UntrainedView]:
        """Yield, for each optimizer and the ranks that keep its model, what never had a gradient.

        `plans_of` tells what is known of the tensors of a rank.
        """
        for optimizer, ranks in self._seen.items():
            groups: dict[tuple[int, ...], dict[int, _Seen]] = {}
            known = sorted({s.members for s in ranks.values() if len(s.members) > 1})
            for rank, seen in ranks.items():
                # Who has no gradient may not have been seen to reduce it: others tell its group.
                members = seen.members if len(seen.members) > 1 else ()
                members = members or next((m for m in known if rank in m), seen.members)
                if seen.num_samples >= FEWEST_SAMPLES:
                    groups.setdefault(members, {})[rank] = seen
            for group in groups.values():
                if any(seen.never for seen in group.values()):
                    yield _view(optimizer, group, plans_of)


def _view(
    optimizer: str, group: dict[int, _Seen], plans_of: Callable[[int], Iterable[TensorPlan]]
) -> UntrainedView:
    parted: dict[str, RankSet] = {}
    if all(len(seen.at_times) < MOST_NAMES for seen in group.values()):
        held = {rank: _copies(optimizer, plans_of(rank)) for rank in group}
        for name in dict.fromkeys(name for seen in group.values() for name in seen.never):
            without = [rank for rank, seen in group.items() if name in seen.never]
            always = [rank for rank, seen in group.items() if name not in seen.at_times]
            # Who has no gradient may not have been seen to reduce it.
            holders = {held[rank].get(name, ()) for rank in always}
            holders |= {held[rank].get(name, ()) for rank in without} - {_UNKNOWN}
            if always and len(holders) == 1 and {*without, *always} <= set(*holders):
                parted[name] = RankSet(always)
    return UntrainedView(
        optimizer,
        {rank: tuple(seen.never) for rank, seen in sorted(group.items())},
        parted,
        min(seen.num_samples for seen in group.values()),
        {rank: seen.site for rank, seen in sorted(group.items())},
    )


def _copies(optimizer: str, plans: Iterable[TensorPlan]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold copies of each parameter of an optimizer, where that is known."""
    return {
        plan.name: _UNKNOWN if plan.evidence is ReplicaEvidence.WORLD else plan.replicas
        for plan in plans
        if optimizer in plan.owners
        and plan.evidence in (*_COPIES, ReplicaEvidence.WORLD)
        and plan.wrapper not in _LEAVE_OUT
        and not plan.is_late
    }
