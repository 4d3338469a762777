"""The positions of tokens that a module with attention was given, known by their usual names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, Final

import torch

from distdiag.probes.forward_arguments import Arguments
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.tensor_bytes import is_readable

_NAMES: Final = {"pos", "position", "positions", "rope", "rotary", "freqs", "cos", "sin"}
_OTHERS: Final = {"bias", "mask", "rank", "offset"}
_MOVED: Final = {"rank", "offset", "shift", "start"}
_BOUNDS: Final = {"seqlens", "document", "documents", "doc", "docs", "segment", "segments"}
PARTED: Final = "attention was given a mask or bounds of documents, which may begin with the parts"
_MAY_MOVE: Final = "{} may move positions on by the rank"
_MOST_TENSORS: Final = 4
_MOST_ELEMENTS: Final = 1 << 22


def positions_in(passes: Iterable[Arguments], length: int) -> list[torch.Tensor]:
    """Return what the innermost of the running modules was given for `length` tokens.

    Whole numbers that the modules may move on, by what they name, say nothing.
    """
    is_moved = False
    for each in passes:
        is_moved = is_moved or bool(_MOVED & set(_words_of(each.code)))
        found = [
            tensor
            for name, value in each.named.items()
            if _is_position(name)
            for tensor in tensors_in(value)
            if is_readable(tensor) and _is_for(tensor, length)
        ]
        if found:
            is_sure = all(map(torch.Tensor.is_floating_point, found)) or not is_moved
            return found[:_MOST_TENSORS] if is_sure else []
    return []


def doubt_of(passes: Iterable[Arguments]) -> str:
    """Say why positions may be right that are the same on all ranks, as far as names tell it."""
    for each in passes:
        for name, value in each.named.items():
            if value is not None and _BOUNDS & set(name.lower().split("_")):
                return PARTED
        for code in each.called:
            words = {*_words_of(code), *code.co_name.lower().split("_")}
            if _NAMES & words and _MOVED & words:
                return _MAY_MOVE.format(code.co_name)
    return ""


def _is_position(name: str) -> bool:
    words = set(name.lower().split("_"))
    return bool(words & _NAMES) and not words & _OTHERS


def _is_for(tensor: torch.Tensor, length: int) -> bool:
    """Say whether a tensor has a position, or an angle for each channel, for each token."""
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.is_complex():
        return False
    if not tensor.is_floating_point():
        return tensor.shape[-1] == length
    return max(tensor.shape[:-1], default=0) == length and tensor.shape[-1] != length


def _words_of(code: CodeType) -> Iterator[str]:
    names: Iterable[Any] = (*code.co_names, *code.co_varnames, *code.co_freevars)
    for name in names:
        yield from name.lower().split("_")
