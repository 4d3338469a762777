"""What a curve tells: one observation, and all of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity


class Kind(StrEnum):
    """What was seen; a kind never changes its meaning."""

    NOT_FINITE = "not-finite"
    SPIKE = "spike"
    DIVERGENCE = "divergence"
    EXPLOSION = "gradient-explosion"
    ZERO_GRADIENT = "zero-gradient"
    CONSTANT_GRADIENT = "constant-gradient"
    STUCK = "stuck"
    PLATEAU = "plateau"
    RATE_JUMP = "learning-rate-jump"
    RATE_ZERO = "learning-rate-zero"
    RESTART_LOSS = "restart-loss"
    RESTART_RATE = "restart-learning-rate"
    RESTART_STEPS = "restart-steps"
    SLOWER = "slower"
    STALLS = "stalls"
    STRAGGLER = "straggler"
    OVERFITTING = "overfitting"
    LOSS_SCALE = "loss-scale-collapse"
    RANKS_PART = "ranks-part"
    ENTROPY_COLLAPSE = "entropy-collapse"
    REWARD_COLLAPSE = "reward-collapse"


class Point(msgspec.Struct, frozen=True):
    """One value of a log: what a reader can look up.

    `line` counts from 1; 0 where the format has no lines. `value` is text, because JSON has no NaN.
    """

    file: str
    line: int
    series: str
    step: float
    value: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.series} = {self.value} at step {spell_step(self.step)} ({place})"


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that curves tell.

    Severity: `error` where training is lost or works on something wrong, `warning` where a correct
    program would not look so, `info` (shown as note) for what is worth knowing. `ranks` is empty
    where the log names none, `attempt` is None where several are concerned. `step` is the step at
    which it begins; `last_step` the one at which it ends, None where it does not end in the log.
    """

    kind: Kind
    severity: Severity
    run: str
    series: str
    message: str
    look_next: str
    ranks: RankSet = msgspec.field(default_factory=RankSet)
    attempt: int | None = None
    step: float | None = None
    last_step: float | None = None
    evidence: tuple[Point, ...] = ()


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """All that was observed, the most severe first, and what was not judged, with the reason."""

    observations: tuple[Observation, ...] = ()
    not_judged: tuple[str, ...] = ()

    def of(self, *kinds: Kind) -> tuple[Observation, ...]:
        """Return the observations of these kinds."""
        return tuple(seen for seen in self.observations if seen.kind in kinds)

    @property
    def has_error(self) -> bool:
        """Whether training is lost, or works on something wrong."""
        return any(seen.severity is Severity.ERROR for seen in self.observations)


def spell_step(step: float) -> str:
    """Return a step as logs write it: ``4500``, or ``1.25`` for epochs."""
    return f"{step:.0f}" if float(step).is_integer() else f"{step:.6g}"


def spell_value(value: float) -> str:
    """Return a value in four significant digits."""
    return f"{value:.4g}"
