"""What a program hands to `distdiag.log`, and who takes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

Take = Callable[[Mapping[str, Any], int | None, FrameType], object]

_takers: Final[list[Take]] = []


def log(step: int | None = None, **values: object) -> None:
    """Tell distdiag of numbers of this step, such as ``log(loss_ce=ce, kl=kl, step=step)``.

    Names say what a number is: one with ``loss`` is a term of the loss; ``kl``, ``kl_coef``,
    ``ratio``, ``reward_std`` and ``grad_norm`` are known, too (`distdiag explain NUM033`). A value
    is a number or a tensor of one element; tensors are read later, so that nothing waits for a
    device. `step` is the program's own count.

    It does nothing where no agent observes the process, and never raises.
    """
    if _takers:
        frame = sys._getframe(1)
        for take in _takers:
            take(values, step, frame)


def hand_to(take: Take) -> Callable[[], None]:
    """Let this function, which raises nothing, have what is logged; return what ends that."""
    _takers.append(take)

    def end() -> None:
        if take in _takers:
            _takers.remove(take)

    return end
