"""The forward passes of modules that route, while a thread is in the middle of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from distdiag.event import CallSite
from distdiag.probes.routing_counters import Versions
from distdiag.probes.routing_mode import RoutingMode

if TYPE_CHECKING:
    from distdiag.probes.routing_counts import CountWatch


@dataclass(slots=True)
class Layer:
    """A module that may route. `num_passes` were begun in this step, observed wholly or not."""

    model: str
    name: str
    members: tuple[int, ...]
    counts: frozenset[int]
    is_random: bool
    calls: dict[bool, int] = field(default_factory=dict)
    num_passes: int = 0


@dataclass(slots=True)
class Pass:
    """A forward pass of such a module that has begun.

    `num_tokens` (0: none yet), `num_experts` and `k` are those of the last choice within it;
    `capacity` is how many tokens an expert takes, 0 if nothing has told.
    """

    layer: Layer
    given: torch.Tensor | None
    is_recompute: bool
    is_observed: bool
    is_random: bool
    call: int
    versions: Versions
    ordinal: int = 0
    number: int = 0
    num_tokens: int = 0
    num_experts: int = 0
    k: int = 0
    capacity: int = 0
    sites: dict[int, CallSite] = field(default_factory=dict)


class Passes(threading.local):
    """The passes that a thread is in the middle of, the outermost one first."""

    def __init__(self) -> None:
        """Be in the middle of none."""
        self.open: list[Pass] = []
        self.mode: RoutingMode | None = None
        self.counts: CountWatch | None = None

    def innermost_routing(self) -> Pass | None:
        """Return the innermost pass in which experts were chosen already."""
        return next((each for each in reversed(self.open) if each.num_tokens), None)
