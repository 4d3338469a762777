"""The forward passes that a thread is in the middle of, and the mode that sees their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from distdiag.probes.routing_biases import Biases, BiasWatch
from distdiag.probes.routing_capacity import CapacityWatch
from distdiag.probes.routing_counts import CountWatch
from distdiag.probes.routing_mode import Chosen, RoutingMode
from distdiag.probes.routing_pass import Layer, Pass

Tell = tuple[
    Callable[[Chosen], None],
    Callable[[], None],
    Callable[[object], None],
    Callable[[torch.Tensor], None],
]
"""Who is told of choices, draws, writes and single numbers."""
Saw = Callable[[str, tuple[Any, ...], object], None]


class Passes(threading.local):
    """The passes of this thread, the outermost one first."""

    def __init__(self, biases: Biases) -> None:
        """Be in the middle of none; note the biases that are seen."""
        self._biases = biases
        self.open: list[Pass] = []
        self.mode: RoutingMode | None = None
        self.counts: CountWatch | None = None

    def innermost_routing(self) -> Pass | None:
        """Return the innermost pass in which experts were chosen already."""
        return next((each for each in reversed(self.open) if each.num_tokens), None)

    def innermost_of(self, layer: Layer) -> Pass | None:
        """Return the innermost pass if it is one of this layer."""
        return self.open[-1] if self.open and self.open[-1].layer is layer else None

    def enter(
        self,
        opened: Pass,
        tell: Tell,
        fail: Callable[[Exception], None],
        saw_call: Saw,
    ) -> None:
        """Begin a pass; the outermost one begins to see calls, and tells of them."""
        self.open.append(opened)
        if self.mode is not None:
            return
        sizes = CapacityWatch(self.open, fail)
        counts = self.counts = CountWatch(self.open, fail)
        biases = BiasWatch(self.open, self._biases, fail)

        def see(name: str, args: tuple[Any, ...], result: object, chosen: Chosen | None) -> None:
            sizes.see(name, args, result, chosen)
            counts.see(name, args, result, chosen)
            biases.see(name, args, result, chosen)
            saw_call(name, args, result)

        self.mode = RoutingMode(*tell, see, fail=fail)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, layer: Layer, settle: Callable[[], None]) -> None:
        """End the pass of a layer, and those within it that were not ended.

        The end of the outermost one is the time to `settle` what its calls have told.
        """
        if not any(each.layer is layer for each in self.open):
            return
        while self.open and self.open.pop().layer is not layer:
            pass
        if not self.open and self.mode is not None:
            settle()
            mode, self.mode, self.counts = self.mode, None, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
