"""The forward passes of modules that route, while a thread is in the middle of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import nn

from distdiag.event import CallSite
from distdiag.probes.routing_counters import Versions
from distdiag.probes.routing_mode import RoutingMode


@dataclass(slots=True)
class Layer:
    """A module that may route."""

    model: str
    name: str
    members: tuple[int, ...]
    counts: frozenset[int]
    is_random: bool
    calls: dict[bool, int] = field(default_factory=dict)


@dataclass(slots=True)
class Pass:
    """A forward pass of such a module that has begun."""

    layer: Layer
    given: torch.Tensor | None
    is_recompute: bool
    is_observed: bool
    is_random: bool
    call: int
    versions: Versions
    number: int = 0
    sites: dict[int, CallSite] = field(default_factory=dict)
    module: nn.Module | None = None


class Passes(threading.local):
    """The passes that a thread is in the middle of."""

    def __init__(self) -> None:
        """Be in the middle of none."""
        self.open: list[Pass] = []
        self.mode: RoutingMode | None = None
