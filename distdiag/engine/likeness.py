"""Compares the models of ranks, as they are when their training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distdiag.gradient_event import GradientSum, GradientSums
from distdiag.sequence_view import Likeness

Tensors = Mapping[str, GradientSum]


class FirstLooks:
    """Keeps the first look at the models of each rank."""

    def __init__(self) -> None:
        """No rank has told of a model yet."""
        self._known: dict[int, dict[str, tuple[int, Tensors]]] = {}

    def feed(self, event: GradientSums) -> None:
        """Take in what one rank tells of one model."""
        tensors = {each.name: each for each in event.gradients}
        self._known.setdefault(event.rank, {}).setdefault(event.model, (event.step, tensors))

    def likeness(self, ranks: Sequence[int]) -> Likeness:
        """Compare the models of these ranks."""
        models = [self._known.get(rank, {}) for rank in ranks]
        if not all(models):
            return Likeness.UNKNOWN
        if len({_shape(each) for each in models}) > 1:
            return Likeness.OTHER_MODELS
        if len({step for each in models for step, _ in each.values()}) > 1:
            return Likeness.UNKNOWN
        first, *others = ([tensors for _, tensors in each.values()] for each in models)
        is_equal = all(_are_equal(first, other) for other in others)
        return Likeness.EQUAL if is_equal else Likeness.OTHER_VALUES


def _shape(models: Mapping[str, tuple[int, Tensors]]) -> frozenset[tuple[str, str, int]]:
    return frozenset(
        (model, tensor.name, tensor.num_elements)
        for model, (_, tensors) in models.items()
        for tensor in tensors.values()
    )


def _are_equal(models: Sequence[Tensors], others: Sequence[Tensors]) -> bool:
    """Say whether most of the elements are the same: a part of a model may be each rank's own."""
    num_elements, num_equal = 0, 0
    for one, other in zip(models, others, strict=True):
        for name, tensor in one.items():
            num_elements += tensor.num_elements
            is_sharded = tensor.members or name not in other  # each rank has another part
            if is_sharded or _is_close(tensor.weight, other[name].weight):
                num_equal += tensor.num_elements
    return 2 * num_equal >= num_elements


def _is_close(one: float, other: float) -> bool:
    # What could not be read is not known to differ.
    return not abs(one - other) > 1e-6 * max(abs(one), abs(other))
