"""Reads how much balancing losses weigh that a function of the program injects into a pass.

Such a function passes a tensor on, and gives a loss beside it a gradient of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from distdiag.probes.aux_terms import Aux, parts_of
from distdiag.probes.guard import guard
from distdiag.probes.loss_terms import Step, number
from distdiag.probes.score_marks import Origin, origin_of
from distdiag.probes.tensor_bytes import is_readable

_MOST_AWAITED: Final = 1024
_MOST_TERMS: Final = 8


class InjectedAux:
    """What forward passes have injected, and the gradients that the next pass gives it."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        """Nothing was injected yet."""
        self._fail = fail
        self._num_awaited = 0
        self._found: list[Aux] = []

    @property
    def is_awaited(self) -> bool:
        """Say whether anything was injected since the last step."""
        return self._num_awaited > 0

    def see(self, node: Any) -> None:  # noqa: ANN401
        """Watch the node of a loss that was injected."""
        origin = origin_of(node)
        if origin is not None and self._num_awaited < _MOST_AWAITED:
            self._num_awaited += 1
            node.register_prehook(self._prehook(origin, parts_of(node)))

    def _prehook(
        self, origin: Origin, parts: list[tuple[Step, ...]]
    ) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def prehook(gradients: Sequence[torch.Tensor | None]) -> None:
            with guard(self._fail):
                gradient = gradients[0]
                is_one = gradient is not None and gradient.numel() == 1
                is_one = is_one and len(self._found) < _MOST_TERMS
                if gradient is not None and is_one and is_readable(gradient):
                    share = Step("/", number(gradient.detach().double().reciprocal()))
                    self._found += [Aux(origin, (share, *way), 0, True) for way in parts]

        return prehook

    def take(self) -> list[Aux]:
        """Return what a pass has come by, since it was asked last."""
        found, self._found = self._found, []
        return found

    def forget(self) -> None:
        """Begin anew with a step."""
        self._num_awaited, self._found = 0, []
