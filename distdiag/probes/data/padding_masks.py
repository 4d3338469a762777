"""Whether the mask that a module was given hides the padding among its token ids, and only that.

The batch shows which id is padding: its mask hides one id, wherever that stands, and nothing
else. However a program splits a sequence, that has to hold of each part.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from distdiag.events.sequences import SeenPadding
from distdiag.probes.data.forward_arguments import Arguments
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Content, Pending, contents
from distdiag.probes.tensors.sample_rows import first_tensors

_IDS: Final = {"ids", "tokens"}
_OTHER_IDS: Final = {"position", "type", "segment", "seq", "sample", "decoder", "labels"}
_OTHER_MASKS: Final = {"loss", "label", "labels", "target", "decoder", "image", "cross", "encoder"}
_INTEGERS: Final = (torch.int64, torch.int32)
_MASKS: Final = (*_INTEGERS, torch.bool)
_MOST_ELEMENTS: Final = 1 << 22
_ROWS_AND_TOKENS: Final = 2
_ARGS_AND_KWARGS: Final = 2


class PaddingReading(NamedTuple):
    """Token ids and their mask, which are being read."""

    pending: Pending
    pad: int
    num_rows: int
    num_tokens: int

    def settle(self, found: list[Content | None]) -> SeenPadding | None:
        """Return what was read, None if something could not be."""
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        ids, mask, *counts = known
        numbers = (int(each.mean) for each in counts)
        return SeenPadding(
            ids.digest, mask.digest, self.pad, self.num_rows, self.num_tokens, *numbers
        )


def is_call(given: object) -> bool:
    """Say whether something is what a module is called with, and no batch."""
    if not isinstance(given, tuple) or len(given) != _ARGS_AND_KWARGS:
        return False
    return isinstance(given[0], tuple) and isinstance(given[1], dict)


def pad_of(batch: object) -> int | None:
    """Return the one token id that a mask hides in a batch on the CPU, wherever it stands."""
    tensors = [each for each in first_tensors(batch) if each.is_cpu and _is_grid(each)]
    found = {_hidden_id(ids, mask) for mask in tensors for ids in tensors} - {None}
    return found.pop() if len(found) == 1 else None


def read_padding(passes: Iterable[Arguments], pad: int) -> PaddingReading | None:
    """Begin to read what the outermost module was given that has both token ids and a mask."""
    for given in reversed([*passes]):
        for ids in _named(given.named, _IDS, _OTHER_IDS):
            for mask in _named(given.named, {"mask"}, _OTHER_MASKS):
                if _are_beside(ids, mask) and ids.device == mask.device:
                    return _read(ids, mask, pad)
    return None


def _named(named: dict[str, Any], words: set[str], others: set[str]) -> Iterator[Tensor]:
    for name, value in named.items():
        parts = set(name.lower().split("_"))
        if parts & words and not parts & others and isinstance(value, Tensor) and _is_grid(value):
            yield value


def _is_grid(tensor: Tensor) -> bool:
    """Say whether a tensor has a whole number for each token of each row."""
    is_kind = tensor.ndim == _ROWS_AND_TOKENS and tensor.dtype in _MASKS
    is_small = is_kind and 0 < tensor.numel() <= _MOST_ELEMENTS
    return is_small and is_readable(tensor)


def _are_beside(ids: Tensor, mask: Tensor) -> bool:
    return mask is not ids and mask.shape == ids.shape and ids.dtype in _INTEGERS


def _hidden_id(ids: Tensor, mask: Tensor) -> int | None:
    if not _are_beside(ids, mask):
        return None
    with out_of_sight():
        if not ((mask == 0) | (mask == 1)).all():
            return None
        hidden, shown = ids[mask == 0], ids[mask != 0]
        if not len(hidden) or not len(shown):
            return None
        pad = int(hidden[0])
        if pad < 0:  # a label that does not count
            return None
        return pad if (hidden == pad).all() and (shown != pad).all() else None


def _read(ids: Tensor, mask: Tensor, pad: int) -> PaddingReading:
    with out_of_sight():
        is_pad, is_hidden = ids == pad, mask == 0
        is_mixed = is_hidden.any(1, keepdim=True)
        counts = (is_pad, is_hidden, is_hidden & ~is_pad, is_pad & ~is_hidden & is_mixed)
        numbers = [each.sum(dtype=torch.float64).reshape(1) for each in counts]
        pending = contents([ids, mask, *numbers])
    pending.guard()
    return PaddingReading(pending, pad, ids.shape[0], ids.numel())
