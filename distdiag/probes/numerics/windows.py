"""What one step has met, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from distdiag.events.base import CallSite
from distdiag.events.numerics import Outcome, Stage
from distdiag.probes.numerics.ranges import Reading

MOST_PLACES: Final = 6
"""So many places of a step are written down: the first one counts, the others show the way."""

_EARLY: Final = ("parameter", "buffer", "input", "forward", "loss")
_RETURNED: Final = ("backward", "weight-gradient")
_APPLIED: Final = ("gradient", "update")


class Detail(IntEnum):
    """How much of a step is read."""

    LOSS = 0
    GRADIENTS = 1  # the loss, and the gradients as an optimizer finds them
    USUAL = 2  # the modules that compute, or blocks of them in the profile `light`, too
    CLOSE = 3  # all modules, their inputs, and each rank's own gradients


@dataclass(slots=True)
class Window:
    """The forward and backward passes that lead to one step of the optimizers.

    `forward` numbers the forward passes since the last backward pass. `detail` is how much of them
    is read.
    """

    step: int
    number: int
    detail: Detail
    site: CallSite = field(default_factory=lambda: CallSite(()))
    num_readings: int = 0
    forward: int = 0
    num_unread: int = 0
    has_backward: bool = False
    is_stepped: bool = False
    is_closed: bool = False
    has_ended: bool = False
    is_loss_finite: bool | None = None
    lost_forward: int = -1
    found: list[Reading] = field(default_factory=list)
    infinite: list[Reading] = field(default_factory=list)
    stages: set[Stage] = field(default_factory=set)
    last_forward: int = -1
    num_found: int = 0
    told: tuple[Outcome, int] | None = None
    has_read_gradients: bool = False

    @property
    def is_close(self) -> bool:
        """Whether all that can be read is."""
        return self.detail is Detail.CLOSE

    def next_number(self) -> int:
        """Return the place of the next reading in the order of the step."""
        self.num_readings += 1
        return self.num_readings

    def begin_backward(self) -> None:
        """Take note of a backward pass: what stepped before the first one ended the last step."""
        if not self.has_backward:
            self.has_backward, self.is_stepped, self.has_read_gradients = True, False, False

    def judge(self, reading: Reading) -> None:
        """Take in what was read of one tensor."""
        if reading.stage == "loss":
            self.is_loss_finite = self.is_loss_finite is not False and not reading.value
        if reading.is_strong:
            self.num_found += 1
            self.stages.add(reading.stage)
            self.last_forward = max(self.last_forward, reading.forward)
            self.found = _first(self.found, reading)
        elif reading.value:
            self.infinite = _first(self.infinite, reading)

    @property
    def begins(self) -> bool:
        """Whether it is known, before the step ends, that something is wrong."""
        return not self.stages.isdisjoint(_EARLY)

    @property
    def outcome(self) -> Outcome:
        """Say what became of the numbers, as far as it is known."""
        if not (self.is_stepped and (self.is_closed or self.stages & {"gradient", "update"})):
            return self._without_step
        if not self.stages.isdisjoint(_APPLIED):
            return "stepped"
        if self.is_loss_finite is False or not self.stages.isdisjoint(_RETURNED):
            return "dropped" if self.has_read_gradients else "stepped"
        return "dropped" if self._is_lost else "masked"

    @property
    def _without_step(self) -> Outcome:
        if self.has_ended:
            return "ended"
        if self.is_closed:
            return "skipped"
        return "dropped" if self._is_lost else ""

    @property
    def _is_lost(self) -> bool:
        """Whether no backward pass came of the forward passes that met something."""
        return bool(self.found) and self.last_forward <= self.lost_forward


def _first(known: list[Reading], reading: Reading) -> list[Reading]:
    """Return the first readings in the order of the step, with another one."""
    return sorted([*known, reading], key=lambda each: each.number)[:MOST_PLACES]
