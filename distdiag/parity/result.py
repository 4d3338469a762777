"""What a comparison of two runs found."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.events.comparisons import Disparity, Subject
from distdiag.parity.explanations import Pair


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the comparison: the losses, and the worst ratio to the bound of each kind."""

    step: int
    reference_loss: float
    candidate_loss: float
    ratios: dict[Subject, float]


@dataclass(slots=True)
class Result:
    """What a comparison found: at most one disparity, since the rest would follow from it."""

    disparity: Disparity | None = None
    rows: list[StepRow] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    drawn_anew: list[str] = field(default_factory=list)
    """Parameters that each rank draws its part of, so that no two runs train the same model."""
