"""Over which tokens each token attends, read from what attention makes of marked values.

Queries and keys are zero, so that all tokens that one may see weigh alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

from distdiag.probes.token_codes import by_token
from distdiag.sequence_event import Context, Run, TokenSpec

_LEAST_WEIGHT: Final = 1e-6
_ROOM: Final = 0.02
_MOST_LANES: Final = 40
_MOST_RUNS: Final = 64
_MOST_RUNS_IN_ALL: Final = 8192

OnTensor = Callable[..., Tensor]


class AttentionPasses:
    """Marks as many tokens at a time as there are channels."""

    def __init__(self, spec: TokenSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare for tensors of this form, whose last dimension is hidden."""
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._hidden = spec.shape[-1]
        self._num_heads = spec.shape[1 if spec.dim == 2 else 2] if len(spec.shape) == 4 else 1

    def run(
        self,
        split: OnTensor,
        attend: OnTensor,
        gather: OnTensor,
        gradient_of: OnTensor,
        tokens: tuple[int, ...],
    ) -> dict[str, Any]:
        """Return what a `TokenPassport` says of attention; the rank holds these `tokens`."""
        seen: dict[str, Any] = {}
        weights = []
        for first in range(0, self._spec.length, self._hidden):
            whole = self._whole(self._marks(first)).requires_grad_(self._spec.has_backward)
            part = split(whole)
            result = attend(*self._zeros(split), part)
            weights.append(self._rows_first(result.detach()))
            seen["attention_shape"] = tuple(result.shape)
            if first == 0 and self._spec.has_backward:
                counts = self._counts()
                gradient = gradient_of(gather(result), whole, counts)
                if result.shape == part.shape:
                    seen["attended"] = by_token(self._spec, gradient)
        lanes = attend(*self._zeros(split), split(self._whole(self._lane_numbers())))
        if result.shape != part.shape or len(tokens) != weights[0].shape[0] * weights[0].shape[1]:
            return seen
        shares = torch.cat(weights, dim=-1)[..., : self._spec.length]
        seen["contexts"] = tuple(self._contexts(tokens, shares, self._rows_first(lanes.detach())))
        return seen

    def _zeros(self, split: OnTensor) -> list[Tensor]:
        zeros = torch.zeros(self._spec.shape, dtype=self._dtype, device=self._device)
        return [split(zeros.clone().requires_grad_(self._spec.has_backward)) for _ in range(2)]

    # Tensors here have the dimensions row, position, head and hidden.

    def _marks(self, first: int) -> Tensor:
        marks = torch.zeros(self._spec.length, self._hidden, device="cpu")
        for channel in range(min(self._hidden, self._spec.length - first)):
            marks[first + channel, channel] = 1
        return marks[None, :, None, :]

    def _lane_numbers(self) -> Tensor:
        # bfloat16 holds them all, and tells an average of one from its neighbours.
        lanes = torch.arange(self._spec.batch * self._num_heads, device="cpu")
        numbers = 2 + lanes % _MOST_LANES
        return numbers.reshape(self._spec.batch, 1, self._num_heads, 1)

    def _counts(self) -> Tensor:
        counts = [len(self._spec.context(position)) for position in range(self._spec.length)]
        return self._whole(torch.tensor(counts, device="cpu")[None, :, None, None])

    def _whole(self, values: Tensor) -> Tensor:
        """Return a tensor of the program's form."""
        form = (self._spec.batch, self._spec.length, self._num_heads, self._hidden)
        whole = values.to(self._device, self._dtype).expand(form)
        whole = whole if len(self._spec.shape) == 4 else whole.squeeze(2)
        return whole.movedim(1, self._spec.dim).contiguous()

    def _rows_first(self, values: Tensor) -> Tensor:
        values = values.cpu().double().movedim(self._spec.dim, 1)
        return values if values.ndim == 4 else values.unsqueeze(2)

    def _contexts(
        self, tokens: tuple[int, ...], shares: Tensor, lanes: Tensor
    ) -> Iterator[Context]:
        total = shares.sum(-1, keepdim=True)
        least = shares.masked_fill(shares < _LEAST_WEIGHT, float("inf")).amin(-1, keepdim=True)
        times = (shares / least).round().long().flatten(0, 1)
        padding = (1 - total).flatten(0, 1).squeeze(-1)
        wanted = self._lane_numbers().double()
        is_mixed = ((lanes / total - wanted).abs() > _ROOM * wanted).any(-1).flatten(0, 1)
        left = _MOST_RUNS_IN_ALL
        for index, token in enumerate(tokens):
            if token < 0 or left <= 0:
                continue
            patterns = dict.fromkeys(tuple(each) for each in times[index].tolist())
            for pattern in patterns:
                of_heads = (times[index] == torch.tensor(pattern, device="cpu")).all(-1)
                share = padding[index][of_heads].max().item()
                runs = _runs(pattern)
                left -= max(len(runs), 1)
                yield Context(
                    token,
                    runs,
                    round(share, 4) if share > _ROOM else 0.0,
                    bool(is_mixed[index][of_heads].any()),
                    () if of_heads.all() else tuple(of_heads.nonzero().flatten().tolist()),
                )


def _runs(times: tuple[int, ...]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for count, group in groupby(enumerate(times), key=lambda item: item[1]):
        places = [place for place, _ in group]
        if count:
            runs.append((places[0], places[-1] + 1, count))
    return tuple(runs[:_MOST_RUNS])
