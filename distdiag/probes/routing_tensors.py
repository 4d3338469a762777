"""Finds the tensor that says which experts the tokens are for, where no call was seen to choose."""

from __future__ import annotations

from typing import Any, Final

import torch

from distdiag.probes.routing_mode import Chosen
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.tensor_bytes import is_readable

_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MOST_CHOSEN: Final = 64


def choice_in(
    value: Any,  # noqa: ANN401
    given: torch.Tensor | None,
    counts: frozenset[int],
) -> Chosen | None:
    """Return the first tensor that can be a choice for the tokens of `given`, as one.

    It has a row for each token, and either some numbers of experts or a truth value for each of the
    `counts` experts. The scores are not known.
    """
    num_tokens = given.numel() // max(1, given.shape[-1]) if given is not None else None
    for tensor in tensors_in(value):
        if tensor.ndim < 2 or not tensor.numel() or not is_readable(tensor):
            continue
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        if num_tokens not in (None, len(rows)):
            continue
        if rows.dtype is torch.bool and (not counts or rows.shape[1] in counts):
            return _of_map(rows)
        if rows.dtype in _INTEGERS and rows.shape[1] <= _MOST_CHOSEN:
            return _of_indices(rows, max(counts, default=0))
    return None


def _of_map(rows: torch.Tensor) -> Chosen:
    number = torch.arange(rows.shape[1], device=rows.device)
    return _chosen("routing map", torch.where(rows, number, -1), rows.shape[1])


def _of_indices(rows: torch.Tensor, num_experts: int) -> Chosen:
    return _chosen("indices", rows.long(), num_experts)


def _chosen(api: str, indices: torch.Tensor, num_experts: int) -> Chosen:
    unknown = torch.empty((len(indices), num_experts), dtype=indices.dtype, device="meta")
    return Chosen(api, unknown, indices, is_sure=True)
