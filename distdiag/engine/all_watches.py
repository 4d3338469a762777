"""What watches the subjects of a run apart from its collectives and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distdiag.engine.apart import Apart
from distdiag.engine.combined_losses import CombinedLosses
from distdiag.engine.data_watch import DataWatch
from distdiag.engine.exchange_watch import ExchangeWatch
from distdiag.engine.gradient_watch import GradientWatch
from distdiag.engine.judges import Judges
from distdiag.engine.lone_steps import LoneSteps
from distdiag.engine.model_watch import ModelWatch
from distdiag.engine.partly_summed import PartlySummed
from distdiag.engine.routing_watch import RoutingWatch
from distdiag.engine.sequence_uses import SequenceUses
from distdiag.engine.sequence_watch import SequenceWatch
from distdiag.engine.state_loads import StateLoads
from distdiag.engine.subjects import LeftOut, Subjects
from distdiag.engine.unobserved import UnobservedThings
from distdiag.engine.watch import ComparedRuns, Watches
from distdiag.placement_rule import PlacementRule
from distdiag.ranks import RankSet

_KINDS: Final = (
    StateLoads,
    DataWatch,
    SequenceWatch,
    SequenceUses,
    RoutingWatch,
    ExchangeWatch,
    GradientWatch,
    CombinedLosses,
    PartlySummed,
    LoneSteps,
    UnobservedThings,
)


def all_watches(
    world: RankSet, judges: Judges, rules: Sequence[PlacementRule], *, only_start: bool
) -> Watches:
    """Return the watches of a run of these ranks; `rules` are the user's own plan.

    `only_start`: the ranks do not look at the steps of their models.
    """
    apart = Apart(judges)
    models = ModelWatch(world, judges, rules, only_start=only_start, apart=apart)
    rest = tuple(kind(world, judges) for kind in _KINDS)
    left_out = LeftOut(judges, only_start=only_start)
    # What the later ones say of a check counts: a subject that was missed may have been hidden.
    return Watches((Subjects(judges), models, apart, *rest, ComparedRuns(judges), left_out))
