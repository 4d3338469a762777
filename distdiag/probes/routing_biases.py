"""Which tensors a router adds to the scores by which it chooses experts, and no gradient trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from distdiag.probes.by_identity import WeakMap
from distdiag.probes.guard import guard
from distdiag.probes.module_parts import own_buffers, own_parameters
from distdiag.probes.routing_mode import Chosen
from distdiag.probes.routing_pass import Pass
from distdiag.probes.tensor_plans import address_of

_ADDS: Final = frozenset(
    ("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__")
)


class Biases:
    """The biases that were seen, by module and name."""

    def __init__(self) -> None:
        """Know of none."""
        self._names: WeakMap[nn.Module, set[str]] = WeakMap()

    def add(self, module: nn.Module, name: str) -> None:
        """Take note of one."""
        self._names.setdefault(module, set()).add(name)

    def has(self, module: nn.Module, name: str) -> bool:
        """Say whether it is one."""
        return name in self._names.get(module, ())


class BiasWatch:
    """Sees the calls within the passes that a thread is in the middle of.

    A bias has one number for each expert and is added to a row of scores for each token; that it is
    one is known when experts are chosen by as many scores later on.
    """

    def __init__(
        self, passes: list[Pass], biases: Biases, fail: Callable[[Exception], None]
    ) -> None:
        """Note the `biases` of the modules of these passes; tell `fail` what goes wrong."""
        self._passes = passes
        self._biases = biases
        self._fail = fail
        self._added: list[tuple[int, nn.Module, str]] = []

    def see(self, name: str, args: Sequence[Any], result: object, chosen: Chosen | None) -> None:
        """Look at a call by the name of its function; `chosen` if it chose experts."""
        with guard(self._fail):
            if chosen is not None:
                self._choose(chosen.scores.shape[1])
            elif name in _ADDS and isinstance(result, torch.Tensor) and len(args) > 1:
                self._add(args[:2], result)

    def _choose(self, num_experts: int) -> None:
        for size, module, name in self._added:
            if size == num_experts:
                self._biases.add(module, name)

    def _add(self, terms: Sequence[Any], result: torch.Tensor) -> None:
        size = result.shape[-1] if result.ndim > 1 else 0
        if not size or not result.is_floating_point() or result.numel() == size:
            return
        for term in terms:
            if isinstance(term, torch.Tensor) and term.numel() == size and not term.requires_grad:
                self._added.extend((size, *found) for found in self._kept(term))

    def _kept(self, term: torch.Tensor) -> Iterator[tuple[nn.Module, str]]:
        """Yield where the modules around keep a tensor, or what it is a view of."""
        place = address_of(term)
        for module in (opened.module for opened in self._passes if opened.module is not None):
            for name, kept in _untrained(module):
                is_same = kept is term or (place is not None and address_of(kept) == place)
                if is_same and kept.numel() == term.numel():
                    yield module, name


def _untrained(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*own_buffers(module).items(), *own_parameters(module).items()):
        if tensor is not None and not tensor.requires_grad:
            yield name, tensor
