"""The forward passes of modules that route, while a thread is in the middle of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from distdiag.event import CallSite
from distdiag.probes.routing_counters import Versions
from distdiag.probes.routing_reading import RoutingReading


@dataclass(slots=True)
class Layer:
    """A module that may route.

    `is_named`: the user says that it does. `is_router`: its class is called so. `num_passes` were
    begun in this step, observed wholly or not.
    """

    model: str
    name: str
    members: tuple[int, ...]
    counts: frozenset[int]
    is_random: bool
    is_named: bool = False
    is_router: bool = False
    calls: dict[bool, int] = field(default_factory=dict)
    num_passes: int = 0


@dataclass(slots=True)
class Pass:
    """A forward pass of such a module that has begun.

    `num_tokens` (0: none yet), `num_experts` and `k` are those of the last choice within it;
    `capacity` is how many tokens an expert takes, 0 if nothing has told. `readings` are those of
    choices in it, and in passes right within it.
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
    module: nn.Module | None = None
    readings: list[RoutingReading] = field(default_factory=list)
