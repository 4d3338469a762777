"""What watches the subjects of a run apart from its collectives and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distdiag.config.placement_rules import PlacementRule
from distdiag.engine.aligner import ComparedRuns, Watches
from distdiag.engine.coverage import LeftOut, Subjects, UnobservedThings
from distdiag.engine.data import DataWatch, LoneSteps
from distdiag.engine.losses.combined import CombinedLosses
from distdiag.engine.losses.gradients import GradientWatch, PartlySummed
from distdiag.engine.models.aligner import ModelWatch
from distdiag.engine.models.loads import StateLoads
from distdiag.engine.models.replicas import Apart
from distdiag.engine.routing.exchanges import ExchangeWatch
from distdiag.engine.routing.routing import RoutingWatch
from distdiag.engine.runner import Judges
from distdiag.engine.sequences import SequenceUses, SequenceWatch
from distdiag.events.ranks import RankSet

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
