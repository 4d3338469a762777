"""Which parameters the program itself broadcasts, or reduces the gradients of, and over whom."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distdiag.probes.tensor_plans import address_of, is_dtensor


class SharedTensors:
    """Recognises parameters by the memory that a collective is given."""

    def __init__(self, roots: Callable[[], Iterable[nn.Module]]) -> None:
        """Look among the parameters of these models."""
        self._roots = roots
        self._owners: dict[tuple[int, int], weakref.ref[nn.Parameter]] = {}
        self._made_at: Hashable = None
        self._ranks: dict[int, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = {}

    @property
    def ranks(self) -> dict[int, tuple[int, ...]]:
        """The global ranks that share a parameter, by its id."""
        alive = {key: pair for key, pair in self._ranks.items() if pair[0]() is not None}
        self._ranks = alive
        return {key: ranks for key, (_, ranks) in alive.items()}

    def note(self, tensors: Any, group: Any, now: Hashable) -> None:  # noqa: ANN401
        """Take note of a collective; while `now` stays the same, so do the parameters."""
        if now != self._made_at:
            self._made_at = now
            self._owners = dict(self._places())
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            reference = self._owners.get(_place(tensor)) if _is_plain(tensor) else None
            owner = None if reference is None else reference()
            if reference is not None and owner is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                self._ranks[id(owner)] = (reference, ranks)

    def _places(self) -> Iterable[tuple[tuple[int, int], weakref.ref[nn.Parameter]]]:
        for root in self._roots():
            for parameter in root.parameters():
                for tensor in (parameter, parameter.grad):
                    if tensor is not None and not is_dtensor(tensor):
                        yield _place(tensor), weakref.ref(parameter)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how large it is; nobody is at 0."""
    return address_of(tensor) or 0, tensor.numel() if address_of(tensor) else -1


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_dtensor(tensor)
