"""What probes observe of gradients between a backward pass and the step that applies them."""

import math

import msgspec

from distdiag.events.base import CallSite, Event


class GradientSum(msgspec.Struct, frozen=True, array_like=True):
    """Weighted sums over one parameter's gradient, where it is made and where it is used.

    The weights are the same on all ranks; several independent sums are taken. `passes` are what
    the backward passes of this rank gave, each before anybody has combined or scaled it, and
    `norms` the roots of their sums of squares; `applied` is what the optimizer finds. Sums of the
    ranks that combine a gradient add up as the gradients do. `members` are the ranks over which the
    parameter is sharded, and `num_copies` of them hold the same shard; empty and 0: this rank
    applies all of it. `weight` is the first sum over the parameter itself, `left` those of a
    gradient that was there before the passes. Empty or NaN: not readable, or none. `rounding` is
    the greatest relative error of one number in the narrowest type that the gradient came by.
    `is_table`: it is the table of an embedding.
    """

    name: str
    num_elements: int
    members: tuple[int, ...]
    num_copies: int
    weight: float
    passes: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    left: tuple[float, ...]
    applied: tuple[float, ...]
    rounding: float
    is_table: bool = False

    @property
    def given(self) -> float:
        """The first sum of all passes together; NaN if there was none."""
        return sum(sums[0] for sums in self.passes) if self.passes else math.nan

    @property
    def norm(self) -> float:
        """A bound of what the passes added up; NaN if there was none."""
        return math.hypot(*self.norms) if self.norms else math.nan

    @property
    def found(self) -> float:
        """The first sum of what the optimizer finds; NaN if it found none."""
        return self.applied[0] if self.applied else math.nan

    @property
    def has_left(self) -> bool:
        """Whether there was a gradient before the passes."""
        return any(self.left)


class Flow(msgspec.Struct, frozen=True, array_like=True):
    """What goes into the backward function of a node of the graph, or comes out of it."""

    num_elements: int
    total: float
    norm: float


class AutogradNode(msgspec.Struct, frozen=True, array_like=True):
    """A node whose backward function is not torch's own arithmetic.

    `calls` are the event numbers, the last one excluded, that were written while it ran.
    `parameters` get their gradient through it and through no other node after it; `below` are
    the nodes, by their places, that are next after it. `is_bounded`: both lists are whole. The
    first of all stands for the loss itself and has no name.
    """

    name: str
    calls: tuple[int, int]
    given: Flow
    passed: Flow
    parameters: tuple[str, ...]
    below: tuple[int, ...]
    is_bounded: bool


class GradientSums(Event, frozen=True, kw_only=True):
    """Gradients of some parameters of a model, for one step.

    `nodes` are those of the first backward pass, the ones nearest to the loss first; there are
    none if the program has never issued an all-to-all nor gathered parts of activations. The first
    and the last of `num_passes` backward passes are told apart, those between are added up.
    `unread` names the library that keeps the gradients where they are not found.

    `loss_scale` is by what the optimizer divides gradients, `loss_factor` the greatest number that
    the loss, or the gradient of a backward pass, was multiplied by; NaN: not known.
    """

    model: str
    gradients: tuple[GradientSum, ...]
    nodes: tuple[AutogradNode, ...]
    site: CallSite
    num_passes: int = 1
    loss_scale: float = 1.0
    loss_factor: float = math.nan
    unread: str = ""
