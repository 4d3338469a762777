"""Reads what the modules of a model return in a forward pass, and the gradients that come back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch import nn

from distdiag.probes.guard import guard
from distdiag.probes.models.registry import class_of
from distdiag.probes.numerics.budget import Budget
from distdiag.probes.numerics.hiding import hiding_operation
from distdiag.probes.numerics.modules import (
    ForwardHooks,
    Watched,
    all_modules,
    block_modules,
    computing_modules,
)
from distdiag.probes.numerics.ranges import Reading
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.sample_rows import tensors_in

_MOST_TENSORS: Final = 4
"""So many tensors of what a module is given or returns are read."""

Place = tuple[str, str, str]
Read = Callable[[Reading, torch.Tensor], None]


class Activations:
    """The places of one forward pass, which the next one replaces."""

    def __init__(
        self,
        read: Read,
        fail: Callable[[Exception], None],
        budget: Budget,
        *,
        is_light: bool = False,
    ) -> None:
        """Give `read` each tensor that is to be read, and where it is; `fail` gets errors.

        If it `is_light`, only blocks are read where not all modules are. `budget` counts the time.
        """
        self._read = read
        self._budget = budget
        self._usual = block_modules if is_light else computing_modules
        self._fail = fail
        self._hooks = ForwardHooks(self._before_module, self._after_module)
        self._modules: WeakMap[nn.Module, tuple[list[Watched], list[Watched]]] = WeakMap()
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Reading]] = {}
        self._last: Reading | None = None
        self._model = self._kind = ""
        self._is_close = False
        self._nodes: dict[Place, Any] = {}
        self.suspects: set[Place] = set()
        """Places whose values were not finite although the loss was."""
        self.hidden_by: dict[Place, str] = {}
        """The operation that hides what these places hold, where the graph shows one."""
        self.is_in_backward = False
        """Whether the backward pass of a training runs, so that gradients are read."""

    def begin(self, root: nn.Module, model: str, given: object, *, is_close: bool) -> None:
        """Begin to read a forward pass of a model: all modules if `is_close`, else blocks."""
        self.clear()
        self._model, self._kind, self._is_close = model, class_of(root), is_close
        for tensor in islice(tensors_in(given), _MOST_TENSORS):
            self._take(Reading("input", "", "", self._kind, "an input"), tensor)
        self._hooks.add(self._modules_of(root), with_inputs=is_close)

    def end(self, output: object) -> None:
        """Read what the model has returned, and end the reading."""
        self._hooks.remove()
        for tensor in islice(tensors_in(output), _MOST_TENSORS):
            known = self._known_reading(tensor)
            if known is not None:
                known.is_output = True
            else:
                made = Reading("forward", "", "", self._kind, "its output", is_output=True)
                self._take(made, tensor)
        self._known.clear()
        self._last = None

    def clear(self) -> None:
        """Forget a forward pass, whatever became of it."""
        self._hooks.remove()
        self._known.clear()
        self._nodes.clear()
        self._last = None

    def look_for_hiding(self, outputs: object) -> None:
        """Find in the graph of a loss what hides the values of suspects."""
        for place, node in self._nodes.items():
            found = hiding_operation(node, outputs)
            if found:
                self.hidden_by[place] = found
        self._nodes.clear()

    def _modules_of(self, root: nn.Module) -> Sequence[Watched]:
        known = self._modules.get(root)
        if known is None or self._is_close:  # a program may add modules
            known = self._modules[root] = (all_modules(root), self._usual(root))
        return known[0] if self._is_close else known[1]

    def _before_module(self, watched: Watched, given: object) -> None:
        with self._budget, guard(self._fail):
            for tensor in islice(tensors_in(given), _MOST_TENSORS):
                known = self._known_reading(tensor)
                if known is None:
                    what = f"an input of {watched.name}"
                    parent, kind = watched.parent, watched.parent_kind
                    known = self._take(Reading("forward", "", parent, kind, what), tensor)
                if known is not None:
                    known.consumers.append((watched.name, watched.kind))

    def _after_module(self, watched: Watched, output: object) -> None:
        with self._budget, guard(self._fail):
            for tensor in islice(tensors_in(output), _MOST_TENSORS):
                made = self._known_reading(tensor)
                if made is None:
                    place = Reading("forward", "", watched.name, watched.kind, "its output")
                    made = self._take(place, tensor)
                if made is not None and not self._is_close and watched.is_block:
                    self._chain(made, tensor, watched)

    def _chain(self, made: Reading, tensor: torch.Tensor, watched: Watched) -> None:
        """Read the gradient of a block's output; who uses it is taken to be the next block."""
        if self._last is not None:
            self._last.consumers.append((watched.name, watched.kind))
        self._last = made
        self._hook(made, tensor)

    def _known_reading(self, tensor: torch.Tensor) -> Reading | None:
        """Return what is known of this very tensor, if nothing has been written to it since."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def _take(self, reading: Reading, tensor: torch.Tensor) -> Reading | None:
        if not tensor.dtype.is_floating_point:
            return None
        reading.model, reading.is_exact = self._model, self._is_close
        self._known[id(tensor)] = (weakref.ref(tensor), _version(tensor), reading)
        self._read(reading, tensor)
        if self._is_close or reading.is_output:
            self._hook(reading, tensor)
        if reading.place in self.suspects and tensor.grad_fn is not None:
            self._nodes[reading.place] = tensor.grad_fn
        return reading

    def _hook(self, reading: Reading, tensor: torch.Tensor) -> None:
        """Read the gradient of a tensor when the backward pass has it."""
        node: Any = tensor.grad_fn
        if node is not None and not _is_compiled_backward():
            node.register_prehook(self._gradient_hook(reading, tensor.output_nr))

    def _gradient_hook(self, reading: Reading, number: int) -> Callable[..., None]:
        def hook(gradients: Sequence[torch.Tensor | None]) -> None:
            if not self.is_in_backward or torch.compiler.is_compiling():
                return
            with self._budget, guard(self._fail):
                gradient = gradients[number]
                if gradient is not None:
                    self._read(_gradient_of(reading), gradient)

        return hook


def _gradient_of(reading: Reading) -> Reading:
    """Return the place of the gradient of what was read: it is made by who used that."""
    what = f"the gradient of {reading.phrase}"
    module, kind = "", ""
    if reading.consumers:
        module, kind = reading.consumers[0]
        what = "the gradient of its input"
    elif not reading.is_output:
        module = reading.module.rpartition(".")[0] if reading.what == "its output" else ""
    found = Reading("backward", reading.model, module, kind, what)
    found.is_exact = reading.is_exact
    return found


def _version(tensor: torch.Tensor) -> int:
    """Return how often it was written to; what is made in inference mode does not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _is_compiled_backward() -> bool:
    """Say whether backward passes are compiled: hooks would become a part of them."""
    config = sys.modules.get("torch._dynamo.config")
    return bool(getattr(config, "compiled_autograd", False))
