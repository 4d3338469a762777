"""The gradients of a program's split attention beside those of plain attention over whole rows.

Queries, keys and values are random numbers here, the same on all ranks. Of each token the sum over
its channels with fixed weights is kept, which is the same for a sum of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from distdiag.sequence_event import TokenSpec

_MOST_SCORES: Final = 1 << 23
_LEAST_ROOM: Final = 1e-3
_MANY_UNITS: Final = 32
_SEED: Final = 20_260_301

OnTensor = Callable[..., Tensor]
Gradients = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]


def attention_gradients(
    spec: TokenSpec,
    device: torch.device,
    functions: tuple[OnTensor, OnTensor, OnTensor],
    gradients_of: Gradients,
) -> dict[str, Any]:
    """Return what a `TokenPassport` says of these gradients; nothing if there would be too many.

    `functions` are split, attention and gather.
    """
    split, attend, gather = functions
    dtype: torch.dtype = getattr(torch, spec.dtype)
    wholes, weights = _random(spec, dtype)
    heads = math.prod(spec.shape) // spec.num_tokens // spec.shape[-1]
    if spec.batch * heads * spec.length**2 > _MOST_SCORES:
        return {}
    sources = [each.to(device).requires_grad_() for each in wholes]
    out = gather(attend(*(split(each) for each in sources)))
    found = gradients_of(out, sources, weights.to(device))
    room = max(_LEAST_ROOM, _MANY_UNITS * torch.finfo(dtype).eps)
    for scale in (spec.shape[-1] ** -0.5, 1.0):
        exact = [each.double().requires_grad_() for each in wholes]
        plain = _plain(spec, exact, scale)
        if out.shape == plain.shape and _is_near(out.detach().cpu().double(), plain, room):
            due = torch.autograd.grad(plain, exact, weights.double())
            return {
                "gradients": tuple(_by_token(spec, each) for each in found),
                "due_gradients": tuple(_by_token(spec, each) for each in due),
            }
    return {}  # another kind of attention, or one that is wrong already


def _random(spec: TokenSpec, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    tensors = [torch.randn(spec.shape, generator=generator).to(dtype) for _ in range(4)]
    return tensors[:3], tensors[3]


def _is_near(out: Tensor, plain: Tensor, room: float) -> bool:
    return bool((out - plain.detach()).norm() <= room * plain.detach().norm())


def _plain(spec: TokenSpec, sources: list[Tensor], scale: float) -> Tensor:
    """Return softmax attention over whole rows."""
    query, key, value = (_heads_first(spec, each) for each in sources)
    seen = torch.zeros(spec.length, spec.length, dtype=torch.bool)
    for position in range(spec.length):
        seen[position, list(spec.context(position))] = True
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    out = (scores.softmax(-1) @ value).transpose(1, 2)  # rows, positions, heads, channels
    out = out if len(spec.shape) == 4 else out.squeeze(2)
    return out.movedim(1, spec.dim)


def _heads_first(spec: TokenSpec, tensor: Tensor) -> Tensor:
    rows = tensor.movedim(spec.dim, 1)
    return (rows if rows.ndim == 4 else rows.unsqueeze(2)).transpose(1, 2)


def _by_token(spec: TokenSpec, gradient: Tensor) -> tuple[float, ...]:
    rows = gradient.detach().cpu().double().movedim(spec.dim, 1)
    channels = rows.reshape(spec.num_tokens, -1)
    weights = torch.cos(2.399963 * torch.arange(channels.shape[1], dtype=torch.float64))
    return tuple((channels @ weights).tolist())
