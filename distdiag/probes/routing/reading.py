"""What one choice of experts looks like: digests and figures that a device may still compute."""

from typing import Any, Final

import torch

from distdiag.events.routing import Choice, Load
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.routing.mode import Chosen
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Content, Pending, contents
from distdiag.probes.untyped import Untyped

_MOST_ROWS: Final = 1 << 12
_ROUNDING: Final = 2.0**-8
"""The relative rounding error of bfloat16."""


class RoutingReading:
    """Reads a choice without waiting; `take` says what came of it."""

    def __init__(
        self,
        chosen: Chosen,
        given: torch.Tensor | None,
        counts: frozenset[int],
        fields: Untyped,
    ) -> None:
        """Begin to read; experts are counted if the scores are of one of the `counts`."""
        scores, indices = chosen.scores, chosen.indices
        num_tokens, num_experts = scores.shape
        dtype = str(scores.dtype).removeprefix("torch.")
        choice = Choice(chosen.api, num_tokens, num_experts, indices.shape[1], dtype)
        self._fields = {**fields, "choice": choice}
        is_of_experts = num_experts in counts or (not counts and choice.k < num_experts)
        self._read(chosen, given, loads=is_of_experts and num_tokens > 0)

    def _read(self, chosen: Chosen, given: torch.Tensor | None, *, loads: bool) -> None:
        scores, indices = chosen.scores, chosen.indices
        self._parts: list[str] = []
        self._counts: torch.Tensor | None = None
        self._dropped: Pending | None = None
        tensors: list[torch.Tensor] = []
        with out_of_sight():
            if given is not None:
                self._add("given", given, tensors)
            self._add("scores", scores, tensors)
            if is_readable(indices):
                self._add("chosen", indices.sort(-1).values, tensors)
                if loads:
                    self._counts = _counts(indices, scores.shape[1])
                    self._add("counts", self._counts, tensors)
            if is_readable(scores) and 0 < indices.shape[1] < scores.shape[1] and len(scores):
                ties, near = _margins(scores, indices.shape[1])
                self._add("ties", ties, tensors)
                self._add("near", near, tensors)
        self._pending: Pending = contents(tensors)
        self._pending.guard()  # whatever comes next may write

    def _add(self, part: str, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self._parts.append(part)
        tensors.append(tensor.detach())

    def limit(self, layer: str, capacity: int) -> None:
        """Begin to count what an expert does not take, if the pass of a layer close by shows it."""
        chose = self._fields["layer"]
        is_near = layer in (chose, chose.rpartition(".")[0])
        if self._counts is not None and capacity > 0 and is_near:
            with out_of_sight():
                beyond = (self._counts - capacity).clamp_(min=0)
                self._dropped = contents([beyond / self._counts.sum().clamp_(min=1)])
            self._counts = None

    def take(self, *, may_wait: bool = False) -> dict[str, Any] | None:
        """Return the fields of the event, None if the device has not finished."""
        found = self._pending.wait() if may_wait else self._pending.take()
        more = self._dropped.take() if self._dropped is not None else ()
        if found is None or more is None:
            return None
        known = dict(zip(self._parts, found, strict=True))
        digests = {part: _digest(known.get(part)) for part in ("given", "scores", "chosen")}
        return {
            **self._fields,
            **digests,
            "tie_share": _mean(known.get("ties")),
            "near_share": _mean(known.get("near")),
            "load": _load(known.get("counts"), more[0] if more else None),
        }


def _counts(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count without the wait that `bincount` costs on a GPU."""
    flat = indices.reshape(-1).clamp(-1, num_experts - 1) + 1  # -1: for none of them
    counts = torch.zeros(num_experts + 1, dtype=torch.float64, device=indices.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))[1:]


def _margins(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for some tokens whether the scores at the boundary are equal, and whether nearly."""
    rows = scores[:: max(1, len(scores) // _MOST_ROWS)].double()
    best = rows.topk(k + 1, -1).values[:, -2:]
    inner, outer = best[:, 0], best[:, 1]
    is_known = inner.isfinite() & outer.isfinite()
    near = is_known & (inner - outer <= _ROUNDING * inner.abs())
    return ((is_known & (inner == outer)).double(), near.double())


def _digest(content: Content | None) -> str:
    return "" if content is None else content.digest


def _mean(content: Content | None) -> float:
    return -1.0 if content is None else content.mean


def _load(content: Content | None, dropped: Content | None) -> Load | None:
    if content is None or not content.mean > 0:
        return None
    share = -1.0 if dropped is None else dropped.mean * dropped.num_elements
    return Load(content.greatest / content.mean, content.zero_share, share)
