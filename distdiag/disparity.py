"""What two runs of one script differ in, as the parity comparison shows it to the checks."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from distdiag.event import Event
from distdiag.ranks import RankSet


class Subject(StrEnum):
    """What differs, in the order of cause and consequence."""

    DATA = "data"
    START = "start"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    UPDATE = "update"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of both runs.

    `measured` is the difference relative to the reference, `bound` what rounding explains of it,
    and `ratio` how many times the bound it is: above 1 the quantity differs. `factor` is by what
    the reference would have to be multiplied to come closest.
    """

    name: str
    measured: float
    bound: float
    ratio: float
    factor: float = 1.0


class Disparity(Event, frozen=True, kw_only=True):
    """At `step` a run differs from its reference, and before it did not.

    `differences` begin with the one that came first (the forward order of modules, the backward
    order of gradients); `num_compared` were compared. `explanation` is what was found out about
    them. `culprits` are the ranks whose part differs, where known. `weights` are the shares with
    which the data of each coordinate enters, where they could be told, and `due` those that it
    should have. `is_share`: it is in a part of the loss only. `is_of_batches`: what all ranks have
    computed is right for the batch of each, but the loss of a batch is no mean over its samples.
    `padded` are the parts of batches, by this step, that were filled up with a value that nobody
    named: what differs may come of that alone.
    """

    subject: Subject
    candidate: str
    reference: str
    differences: tuple[Difference, ...]
    num_compared: int
    explanation: str = ""
    culprits: RankSet
    weights: tuple[float, ...] = ()
    due: tuple[float, ...] = ()
    details: tuple[str, ...] = ()
    is_share: bool = False
    is_of_batches: bool = False
    padded: tuple[str, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether what differs may be meant, or may come of what the comparison invented."""
        return self.is_of_batches or bool(self.padded)
