"""The moments of a run that one probe sees and others want to know of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass(eq=False)
class Moments:
    """Who is called at each moment; None or an empty list if nobody wants to know."""

    before_sync: Callable[[], None] | None = None
    """Called before an event that orders what this rank did for other ranks, or they for it."""
    after_wrap: Callable[[Any], None] | None = None
    """Called with modules when FSDP2 has wrapped them."""
    on_start: list[Callable[[Any], None]] = field(default_factory=list)
    """Called with each model that begins."""
    on_share: list[Callable[[], None]] = field(default_factory=list)
    """Called before each all-reduce or broadcast of the program."""
    on_exchange: Callable[[str, Any, Any, int, FrameType], None] | None = None
    """Called before a collective or message that may bring an activation to other ranks, with its
    name, what is given to it, the process group, the rank in it that gets a message, and the frame
    of the call."""
    on_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after each step."""
    stepped: Callable[[], object] = lambda: None
    """Returns the optimizer that stepped last, if it is still there."""
    before_model: Callable[[Any, object], bool] | None = None
    """Called with a wrapped model and its inputs; says whether it is the outermost one."""
    after_model: Callable[[object], None] | None = None
    """Called with the output when the forward pass of the outermost wrapped model is over."""
    on_given: list[Callable[[object], None]] = field(default_factory=list)
    """Called with batches of loaders, and with what models are given in training that are wrapped,
    or whose attention works on sequences that ranks share."""
    on_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called before each backward pass."""
    on_balanced: list[Callable[[list[str]], None]] = field(default_factory=list)
    """Called with the layers of whose scores a term of a loss is made, before its pass."""
    doubts_balance: Callable[[], bool] = lambda: False
    """Says whether a balancing loss was computed in this step that was never used so far."""
    on_injected: list[Callable[[object], None]] = field(default_factory=list)
    """Called with the node of a balancing loss that a function of the program was given beside a
    tensor that it passes on."""
    on_graph: list[Callable[[object], None]] = field(default_factory=list)
    """Called with what a backward pass starts from, before it does."""
    on_update: list[Callable[[object], None]] = field(default_factory=list)
    """Called with each optimizer that is about to step."""
    has_exchanged: bool = False
    """Whether the program has ever issued an all-to-all, or gathered parts of activations."""
    before_share: Callable[[object, object], None] | None = None
    """Called with the tensors of an all-reduce or a broadcast, and the process group."""
    after_call: Callable[[int, str], None] | None = None
    """Called when a collective was written down, with its event number and operation."""
    before_save: Callable[[object, FrameType], None] | None = None
    """Called with what `torch.save` is given."""
    before_forward: Callable[[], None] | None = None
    """Called when a sharded model is about to be used for the first time."""
    live_models: Callable[[], list[Any]] | None = None
    """Returns the models that there are, the oldest first."""
    after_read: Callable[[Any, FrameType], None] | None = None
    """Called with a state dict into which a distributed checkpoint was read."""
    is_routing_bias: Callable[[Any, str], bool] = lambda *_: False
    """Says of a module and a name whether that is a bias by which it chooses experts."""
    cutting_mesh: object = None
    """The mesh over which torch's context parallelism cut last."""
    is_cut: Callable[[object], bool] = lambda _: False
    """Says whether a tensor is cut along a sequence, so that each rank holds a part of it."""
