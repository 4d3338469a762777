"""Switches dropout off, so that runs on different numbers of ranks can be compared."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from distdiag.probes.base import AnyCallable, Patches, wrap_like

_NAMES: Final = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)


def switch_dropout_off(patches: Patches) -> None:
    """Let the functions that drop return what they are given."""
    for name in _NAMES:
        patches.wrap(functional, name, _keeping)
    patches.wrap(torch, "dropout", _keeping)
    patches.wrap(functional, "scaled_dot_product_attention", _without_dropout)


def _keeping(original: AnyCallable) -> AnyCallable:
    @wrap_like(original)
    def keep(input: torch.Tensor, *_: object, **__: object) -> torch.Tensor:  # noqa: A002
        return input

    return keep


def _without_dropout(original: AnyCallable) -> AnyCallable:
    @wrap_like(original)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return original(query, key, value, attn_mask, 0.0, is_causal, **more)

    return attention
