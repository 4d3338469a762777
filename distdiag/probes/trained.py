"""What a pass over the data has trained: the parameters of the optimizer that stepped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Self

import torch

from distdiag.probes.optimizer_state import parameters_of


class Trained:
    """The parameters of one optimizer, kept by weak references: an id alone may be used again."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember these parameters."""
        self._parameters = [weakref.ref(each) for each in parameters]

    @classmethod
    def by(cls, optimizer: object) -> Self | None:
        """Return what an optimizer trains; None: there is none, or it holds nothing."""
        held = parameters_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        return cls(held) if held else None

    def overlaps(self, other: Trained) -> bool:
        """Say whether some parameter, still alive, belongs to both."""
        mine = {id(p) for each in self._parameters if (p := each()) is not None}
        theirs = {id(p) for each in other._parameters if (p := each()) is not None}
        return not mine.isdisjoint(theirs)


def may_overlap(one: Trained | None, other: Trained | None) -> bool:
    """Say whether two passes may have trained the same; it is not known of all what they train."""
    return one is None or other is None or one.overlaps(other)
