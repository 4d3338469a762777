"""The labels of whole sequences among what a model was given, and what a shift by one leaves out.

A loss of a causal model sees labels without the first one of each sequence. How many of those were
valid can only be told by the tensor from which they were taken.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from distdiag.loss_event import LossPass
from distdiag.probes.loss_terms import Scalar, Term, number
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.tensor_bytes import is_readable

MOST_TENSORS: Final = 32
IGNORED: Final = -100

_KINDS: Final = (torch.int64, torch.int32, torch.bool)


class Counts(NamedTuple):
    """What one tensor holds, if it holds labels: of all sequences, and after a shift by one.

    `label_sum` is that of the valid labels after the shift, None for a mask.
    """

    num_shifted: int
    num_all: Scalar
    num_valid: Scalar
    label_sum: Scalar | None


class LabelTensors:
    """Tensors that may hold labels, as long as the program keeps them."""

    def __init__(self) -> None:
        """Nothing was given yet."""
        self._seen: deque[weakref.ref[torch.Tensor]] = deque(maxlen=MOST_TENSORS)

    def see(self, given: object) -> None:
        """Take note of a batch, or of what a model is given."""
        known = {id(each()) for each in self._seen}
        for tensor in tensors_in(given):
            is_kind = tensor.dim() == 2 and tensor.dtype in _KINDS and tensor.shape[1] > 1
            if is_kind and id(tensor) not in known and is_readable(tensor):
                self._seen.append(weakref.ref(tensor))

    def counts_for(self, terms: Sequence[Term]) -> list[Counts]:
        """Count what may be the labels of these losses."""
        kinds = {(term.kind, term.ignored) for term in terms if term.kind != "dense"}
        if len(kinds) != 1:
            return []
        kind, ignored = kinds.pop()
        tensors = [tensor for each in self._seen if (tensor := each()) is not None]
        if kind == "nll":
            return [_labels(tensor, ignored) for tensor in tensors]
        return [_mask(t != hidden) for t in tensors for hidden in (0, IGNORED)]


def _labels(labels: torch.Tensor, ignored: int) -> Counts:
    later = labels[:, 1:]
    return _mask(labels != ignored)._replace(
        label_sum=number(torch.where(later != ignored, later, 0).sum())
    )


def _mask(valid: torch.Tensor) -> Counts:
    later = valid[:, 1:]
    return Counts(later.numel(), number(valid.sum()), number(later.sum()), None)


def num_first(found: Sequence[Counts], each: LossPass, label_sum: float) -> int:
    """Return how many first labels the only tensor has that fits a loss, -1 if none is known.

    All scalars have been read.
    """
    fitting = {
        int(float(counts.num_all) - float(counts.num_valid))
        for counts in found
        if counts.num_valid == each.num_counted
        and (counts.label_sum == label_sum or counts.label_sum is None)
        and (counts.num_shifted == each.num_elements or counts.label_sum is not None)
    }
    return fitting.pop() if len(fitting) == 1 else -1
