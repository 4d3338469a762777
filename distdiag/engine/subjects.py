"""What a run has none of, and what its profile leaves out: checks of it have looked at nothing."""

from __future__ import annotations

from typing import Final

from distdiag.data_event import ModelFed, ScheduleState
from distdiag.engine.judges import Judges
from distdiag.engine.model_coverage import LIGHT
from distdiag.engine.watch import Watch
from distdiag.event import Event
from distdiag.gradient_event import GradientSums
from distdiag.loss_event import LossWeights
from distdiag.model_event import ModelPlan
from distdiag.routing_event import AuxLoss, CounterWritten, Routing
from distdiag.sequence_use_event import SequenceUse

_OF_STEPS: Final = (AuxLoss, GradientSums, LossWeights, SequenceUse)
"""Nothing of these is recorded where the ranks leave the steps out."""


class Subjects(Watch):
    """Knows of which checks a run has something to look at, where they say what that is."""

    kinds = (
        CounterWritten,
        LossWeights,
        ModelFed,
        ModelPlan,
        Routing,
        ScheduleState,
        SequenceUse,
    )

    def __init__(self, judges: Judges) -> None:
        """Nothing was seen yet."""
        self._judges = judges
        self._unseen = {check.code: check for check in judges.with_subject}

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks whose subject was never seen."""
        return {code: check.absent for code, check in self._unseen.items()}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        for code, check in tuple(self._unseen.items()):
            if self._judges.is_concerned(check, event):
                del self._unseen[code]


class LeftOut(Watch):
    """Knows which checks a run of the light profile cannot have."""

    kinds = ()

    def __init__(self, judges: Judges, *, only_start: bool) -> None:
        """Take note of whether the ranks look at the steps of their models."""
        self._judges = judges
        self._only_start = only_start

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of what happens in steps, if these are left out."""
        if not self._only_start:
            return {}
        return {check.code: LIGHT for kind in _OF_STEPS for check in self._judges.needing(kind)}
