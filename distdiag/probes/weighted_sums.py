"""A weighted sum over a tensor, or a shard of it, that all ranks take in the same way."""

from __future__ import annotations

import functools
from typing import Final

import torch

_ROWS: Final = 256
_COLUMNS: Final = 4096


def weighted_sum(
    tensor: torch.Tensor, shape: torch.Size, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, and that of the squares, over evenly spaced elements.

    The tensor holds the rows from number `first` on of one that has this shape. Each row and
    column has a weight of its own: plain sums are often zero by construction, as those of logits.
    """
    if not tensor.numel():
        zero = tensor.new_zeros((), dtype=torch.float64)
        return zero, zero  # a shard may be empty
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    step = max(1, (shape[0] if shape else 1) // _ROWS)
    stride = max(1, rows.shape[1] // _COLUMNS)
    skipped = -first % step
    taken = rows[skipped::step, ::stride].to(torch.float64)
    weighted = taken * _weights(taken.shape[0], first + skipped, step, taken).unsqueeze(1)
    columns = _weights(taken.shape[1], 0, stride, taken)
    return (weighted.sum(0) * columns).sum(), taken.square().sum()


def _weights(number: int, first: int, step: int, like: torch.Tensor) -> torch.Tensor:
    if like.device.type == "cpu":
        return _known_weights(number, first, step)
    return _new_weights(number, first, step, like.device)


@functools.lru_cache(maxsize=64)
def _known_weights(number: int, first: int, step: int) -> torch.Tensor:
    return _new_weights(number, first, step, torch.device("cpu"))


def _new_weights(number: int, first: int, step: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(number, dtype=torch.float64, device=device) * step + first
    return torch.sin(places * places * 0.317 + places * 12.9898 + 1.0)
