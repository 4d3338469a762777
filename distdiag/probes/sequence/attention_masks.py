"""Which keys a call of attention may see, read from its mask, its scores or its lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeGuard

import msgspec
import torch
from torch import Tensor

from distdiag.events.sequences import SeenMask
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.sequence.attention_calls import Attention, Given
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Content, Pending, contents

_HIDDEN: Final = -9e3
"""Scores and masks below this hide a key: some programs add -10,000."""
_MOST_ELEMENTS: Final = 1 << 24
_BATCHED_DIMS: Final = 4
_PACKED_DIMS: Final = 3
_MASK, _CAUSAL, _FLASH_CAUSAL, _ENDS = (3, "attn_mask"), (5, "is_causal"), (5, "causal"), 3


class MaskReading(NamedTuple):
    """A mask that is being read, and what was known of it at once."""

    pending: Pending
    settle: Callable[[list[Content | None]], SeenMask]


def read_mask(given: Given, attention: Attention, num_ranks: int) -> MaskReading | None:
    """Begin to read what hides keys in a call of attention; None if nothing does."""
    seen = SeenMask(num_queries=attention.num_queries, num_keys=attention.num_keys)
    match given.form:
        case "scores":
            scores = given.args[0] if given.args else given.kwargs.get("input")
            return _of_mask(scores, seen, num_ranks)
        case "query" if given.argument(*_MASK) is not None:
            return _of_mask(given.argument(*_MASK), seen, num_ranks)
        case "query":
            return _aligned(seen, "first" if given.argument(*_CAUSAL) is True else "")
    rows = [given.argument(n, name) for n, name in enumerate("qk")]
    packed = [each for each in rows if isinstance(each, Tensor) and each.ndim == _PACKED_DIMS]
    if len(packed) == len(rows):
        return _of_lengths(given, seen, tuple(map(len, packed)))
    return _aligned(seen, "last" if given.argument(*_FLASH_CAUSAL) is True else "")


def _aligned(seen: SeenMask, where: Literal["", "first", "last"]) -> MaskReading | None:
    if not where or seen.num_queries >= seen.num_keys:
        return None
    return MaskReading(contents([]), lambda _: msgspec.structs.replace(seen, aligned=where))


def _of_mask(mask: object, seen: SeenMask, num_ranks: int) -> MaskReading | None:
    if not _is_mask(mask) or mask.shape[-1] != seen.num_keys:
        return None
    with out_of_sight():
        visible = mask if mask.dtype is torch.bool else mask > _HIDDEN
        keys = _keys(visible)
        is_even = seen.num_keys % num_ranks == 0
        parts = list(keys.to(torch.uint8).chunk(num_ranks, -1)) if is_even else []
        pending = contents([_is_causal(visible).reshape(1).to(torch.uint8), *parts])
    pending.guard()

    def settle(found: list[Content | None]) -> SeenMask:
        causal, *known = found
        is_causal = causal is not None and causal.mean == 1
        return msgspec.structs.replace(
            seen,
            aligned="first" if is_causal else "",
            parts=tuple(each.digest if each else "" for each in known),
            shares=tuple(each.mean if each else 1.0 for each in known),
        )

    return MaskReading(pending, settle)


def _is_mask(mask: object) -> TypeGuard[Tensor]:
    if not isinstance(mask, Tensor) or not is_readable(mask):
        return False
    is_kind = mask.dtype is torch.bool or mask.is_floating_point()
    return is_kind and mask.ndim > 1 and 0 < mask.numel() <= _MOST_ELEMENTS


def _keys(visible: Tensor) -> Tensor:
    """Return for each row of the batch which keys any query sees."""
    if visible.ndim < _BATCHED_DIMS:
        return visible.any(-2)
    return visible.flatten(1, -2).any(1)


def _is_causal(visible: Tensor) -> Tensor:
    """Say whether each query sees the keys up to its own number, and no others."""
    queries, keys = visible.shape[-2:]
    if not 1 < queries < keys:
        return torch.zeros((), dtype=torch.bool, device=visible.device)
    below = torch.ones(queries, keys, dtype=torch.bool, device=visible.device).tril()
    return (visible == below).all()


def _of_lengths(given: Given, seen: SeenMask, num_rows: tuple[int, ...]) -> MaskReading | None:
    """Read the last of the cumulative lengths, which is the greatest."""
    ends = [given.argument(_ENDS + n, f"cu_seqlens_{name}") for n, name in enumerate("qk")]
    tensors = [each for each in ends if isinstance(each, Tensor) and is_readable(each)]
    if len(tensors) < len(ends):
        return None
    pending = contents(tensors)
    pending.guard()

    def settle(found: list[Content | None]) -> SeenMask:
        if any(each is None or each.greatest != each.greatest for each in found):
            return seen
        known = tuple(int(each.greatest) for each in found if each is not None)
        return msgspec.structs.replace(seen, ends=known, num_rows=num_rows)

    return MaskReading(pending, settle)
