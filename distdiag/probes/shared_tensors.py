"""Which parameters the program itself broadcasts, or reduces the gradients of, and over whom."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import address_of

_Ranks = dict[int, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]]


def _alive(found: _Ranks) -> dict[int, tuple[int, ...]]:
    return {key: ranks for key, (reference, ranks) in found.items() if reference() is not None}


class SharedTensors:
    """Recognises parameters by the memory that a collective is given."""

    def __init__(self, roots: Callable[[], Iterable[nn.Module]]) -> None:
        """Look among the parameters of these models."""
        self._roots = roots
        self._owners: dict[tuple[int, int], tuple[weakref.ref[nn.Parameter], bool]] = {}
        self._made_at: tuple[int, int] = (-1, -1)
        self._sent: _Ranks = {}
        self._reduced: _Ranks = {}

    def sent(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks that share a parameter because it was sent round, by its id."""
        return _alive(self._sent)

    def reduced(self, num_backwards: int) -> dict[int, tuple[int, ...]]:
        """Return the ranks that have reduced a parameter's gradient since this backward pass."""
        return _alive(self._reduced) if self._made_at[1] == num_backwards else {}

    def note(self, tensors: Any, group: Any, now: tuple[int, int]) -> None:  # noqa: ANN401
        """Take note of a collective; `now` counts models and backward passes."""
        if now != self._made_at:
            self._made_at = now
            self._owners = dict(self._places())
            self._reduced.clear()
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            found = self._owners.get(_place(tensor)) if _is_plain(tensor) else None
            owner = None if found is None else found[0]()
            if found is not None and owner is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                (self._reduced if found[1] else self._sent)[id(owner)] = (found[0], ranks)

    def _places(
        self,
    ) -> Iterable[tuple[tuple[int, int], tuple[weakref.ref[nn.Parameter], bool]]]:
        for root in self._roots():
            for parameter in root.parameters():
                for tensor in (parameter, parameter.grad):
                    if tensor is not None and not is_dtensor(tensor):
                        yield _place(tensor), (weakref.ref(parameter), tensor is not parameter)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies and how large it is; nobody is at 0."""
    return address_of(tensor) or 0, tensor.numel() if address_of(tensor) else -1


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_dtensor(tensor)
