"""Projections of attention that a plan splits in the middle of a head."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_COUNTS: Final = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)


def cut_heads(parent: Any, projection: object, num_parts: int) -> str:  # noqa: ANN401
    """Say which heads cannot be split so, an empty string if all can or nothing is known."""
    if not isinstance(projection, nn.Linear) or num_parts < 2:
        return ""
    width = projection.out_features
    counts = _counts(parent)
    head_dim = getattr(parent, "head_dim", None)
    if type(head_dim) is not int or head_dim <= 0:
        if len(counts) != 1 or width != projection.in_features:
            return ""  # the projection may be another one, or several in one
        head_dim = width // next(iter(counts))
    num_heads, rest = divmod(width, head_dim) if head_dim else (0, 1)
    if rest or num_heads not in counts or num_heads % num_parts == 0:
        return ""
    return f"{num_heads} heads of {head_dim} cannot be split over {num_parts} ranks"


def _counts(parent: Any) -> set[int]:  # noqa: ANN401
    holders = [vars(parent), getattr(getattr(parent, "config", None), "__dict__", {})]
    values = [holder.get(name) for holder in holders for name in _COUNTS]
    return {value for value in values if type(value) is int and value > 0}
