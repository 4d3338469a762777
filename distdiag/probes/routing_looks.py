"""At which steps of a model its routing is looked at."""

from __future__ import annotations

from typing import Final

from distdiag.probes.aux_watch import AuxWatch
from distdiag.probes.own_steps import EVERY

FIRST_STEPS: Final = 4
FIRST_STEPS_IN_LIGHT: Final = 2
_IN_A_ROW: Final = 16


class RoutingLooks:
    """The first steps, each hundredth, and more of them while a balancing loss was never used."""

    def __init__(self, aux: AuxWatch, *, is_light: bool) -> None:
        """Ask whether balancing losses are used; fewer first steps are due if it `is_light`."""
        self._aux = aux
        self._num_first = FIRST_STEPS_IN_LIGHT if is_light else FIRST_STEPS

    def is_due(self, step: int, first: int) -> bool:
        """Say whether to look at a step of a model that began at step `first`."""
        if step < first + self._num_first or step % EVERY == 0:
            return True
        # What is used every other step is met before a hundredth one, if not at it.
        is_before = (step + 1) % EVERY == 0 and self._aux.has_unused
        return is_before or (self._aux.has_forgotten and _is_in_a_row(step - first))


def _is_in_a_row(since: int) -> bool:
    """Say whether a step is one of the first ones of all, or after their number has doubled."""
    doubled = 1 << max(since.bit_length() - 1, 0)
    return since < _IN_A_ROW or since - doubled < min(doubled // 4, _IN_A_ROW)
