"""The labels of whole sequences among what a model was given, and what a shift by one leaves out.

A loss of a causal model sees labels without the first one of each sequence. How many of those were
valid is known only from the tensor from which they were taken.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from distdiag.events.losses import LossPass
from distdiag.probes.losses.terms import Scalar, Term, number
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.sample_rows import tensors_in

MOST_TENSORS: Final = 32
MOST_PARTS: Final = 16
IGNORED: Final = -100

_TARGETS: Final = "shift_labels"
_ARGS_AND_KWARGS: Final = 2
_KINDS: Final = (torch.int64, torch.int32, torch.bool)


class Counts(NamedTuple):
    """What one tensor holds, if it holds labels: of all sequences, and after a shift by one.

    It may be one of `num_parts` equal parts of what was given. `label_sum` is that of the valid
    labels after the shift, None for a mask.
    """

    num_rows: int
    num_shifted: int
    num_parts: int
    num_all: Scalar
    num_valid: Scalar
    label_sum: Scalar | None


class LabelTensors:
    """Tensors that may hold labels, as long as the program keeps them."""

    def __init__(self) -> None:
        self._seen: deque[weakref.ref[torch.Tensor]] = deque(maxlen=MOST_TENSORS)
        self._targets: Counts | None = None

    def see(self, given: object) -> None:
        """Take note of a batch, or of what a model is given."""
        targets = _targets_in(given)
        if targets is not None:
            self._targets = _labels(targets, IGNORED)
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
        seen = (each() for each in self._seen)
        tensors = [each for each in seen if each is not None and is_readable(each)]
        if kind == "nll":
            size = sum(term.num_elements for term in terms if term.kind == kind)
            parts = [part for tensor in tensors for part in _parts(tensor, size)]
            return [_labels(part, ignored, number) for part, number in parts]
        return [_mask(t != hidden) for t in tensors for hidden in (0, IGNORED)]

    def take_targets(self) -> Counts | None:
        """Return the count of labels that the model was given for this pass, shifted already."""
        targets, self._targets = self._targets, None
        return targets


def _targets_in(given: object) -> torch.Tensor | None:
    """Return what a model is given under the name that splitting frameworks use."""
    if not isinstance(given, tuple) or len(given) != _ARGS_AND_KWARGS:
        return None
    targets = given[1].get(_TARGETS) if isinstance(given[1], dict) else None
    if not isinstance(targets, torch.Tensor) or targets.dim() != 2:
        return None
    return targets if targets.dtype in _KINDS and is_readable(targets) else None


def _parts(tensor: torch.Tensor, num_elements: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield what was given, and parts of its sequences that have as many labels as a loss scores.

    Where a loss shifts a part by itself, it scores one label less for each row, or ignores one.
    """
    yield tensor, 1
    rows, length = tensor.shape
    for scored in range(2) if rows and num_elements % rows == 0 else ():
        part = num_elements // rows + scored
        count = length // part if part > 1 and length % part == 0 else 1
        if 1 < count <= MOST_PARTS:
            yield from ((each, count) for each in tensor.chunk(count, 1))


def _labels(labels: torch.Tensor, ignored: int, num_parts: int = 1) -> Counts:
    later = labels[:, 1:]
    return _mask(labels != ignored)._replace(
        num_parts=num_parts, label_sum=number(torch.where(later != ignored, later, 0).sum())
    )


def _mask(valid: torch.Tensor) -> Counts:
    later = valid[:, 1:]
    return Counts(len(valid), later.numel(), 1, number(valid.sum()), number(later.sum()), None)


def num_first(found: Sequence[Counts], each: LossPass, label_sum: float) -> tuple[int, int]:
    """Return how many first labels the tensors have that fit a loss, and how many others.

    They are -1 if none is known, or if tensors differ in that. All scalars have been read. Parts
    are asked where nothing fits as it was given.
    """
    fits = [
        counts
        for counts in found
        if counts.num_valid == each.num_counted
        and (counts.label_sum == label_sum or counts.label_sum is None)
        and (counts.num_shifted == each.num_elements or counts.label_sum is not None)
    ]
    fitting = {
        (int(float(counts.num_all) - float(counts.num_valid)), counts.num_shifted)
        for counts in [fit for fit in fits if fit.num_parts == 1] or fits
    }
    firsts, others = {first for first, _ in fitting}, {other for _, other in fitting}
    if len(firsts) != 1:
        return -1, -1
    return firsts.pop(), others.pop() if len(others) == 1 else -1
