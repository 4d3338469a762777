"""What probes observe of gradients between a backward pass and the step that applies them."""

import msgspec

from distdiag.events.base import CallSite, Event


class GradientSum(msgspec.Struct, frozen=True, array_like=True):
    """A weighted sum over one parameter's gradient, where it is made and where it is used.

    The weights are the same on all ranks. `given` is what the backward passes of this rank gave,
    before anybody has combined or scaled it, and `norm` the root of its sum of squares; `applied`
    is what the optimizer finds. Sums of the ranks that combine a gradient add up as the gradients
    do. `members` are the ranks over which FSDP2 shards the parameter, and `num_copies` of them hold
    the same shard; empty and 0: this rank holds all of it. `weight` is the sum over the parameter
    itself, `left` that of a gradient that was there before the passes. NaN: not readable, or none.
    `is_table`: it is the table of an embedding.
    """

    name: str
    num_elements: int
    members: tuple[int, ...]
    num_copies: int
    weight: float
    left: float
    given: float
    norm: float
    applied: float
    is_table: bool = False


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
    none if the program has never issued an all-to-all nor gathered parts of activations.
    """

    model: str
    gradients: tuple[GradientSum, ...]
    nodes: tuple[AutogradNode, ...]
    site: CallSite
