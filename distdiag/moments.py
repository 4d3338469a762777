"""The moments of a run that one probe sees and others want to know of."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any


class Moments:
    """Who is called at each moment; None or an empty list if nobody wants to know."""

    def __init__(self) -> None:
        """Nobody wants to know of anything yet."""
        self.before_sync: Callable[[], None] | None = None
        """Called before an event that orders what this rank did for other ranks, or they for it."""
        self.after_wrap: Callable[[Any], None] | None = None
        """Called with modules when FSDP2 has wrapped them."""
        self.on_start: list[Callable[[Any], None]] = []
        """Called with each model that begins."""
        self.on_share: list[Callable[[], None]] = []
        """Called before each all-reduce or broadcast of the program."""
        self.on_exchange: Callable[[str, Any, Any, int, FrameType], None] | None = None
        """Called before a collective or message that may bring an activation to other ranks, with
        its name, what is given to it, the process group, the rank in it that gets a message, and
        the frame of the call."""
        self.on_step: list[Callable[[], None]] = []
        """Called after each step."""
        self.stepped: Callable[[], object] = lambda: None
        """Returns the optimizer that stepped last, if it is still there."""
        self.before_model: Callable[[Any, object], bool] | None = None
        """Called with a wrapped model and its inputs; says whether it is the outermost one."""
        self.after_model: Callable[[object], None] | None = None
        """Called with the output when the forward pass of the outermost wrapped model is over."""
        self.on_given: list[Callable[[object], None]] = []
        """Called with batches of loaders, and with what wrapped models are given in training."""
        self.on_backward: list[Callable[[], None]] = []
        """Called before each backward pass."""
        self.before_share: Callable[[object, object], None] | None = None
        """Called with the tensors of an all-reduce or a broadcast, and the process group."""
        self.before_save: Callable[[object, FrameType], None] | None = None
        """Called with what `torch.save` is given."""
        self.before_forward: Callable[[], None] | None = None
        """Called when a sharded model is about to be used for the first time."""
        self.live_models: Callable[[], list[Any]] | None = None
        """Returns the models that there are, the oldest first."""
        self.after_read: Callable[[Any, FrameType], None] | None = None
        """Called with a state dict into which a distributed checkpoint was read."""
