"""What checks of gradient norms have in common."""

from collections.abc import Mapping
from math import isfinite, sqrt

from distdiag.events.updates import OptimizerUpdate
from distdiag.views.updates import UpdateView


def total_norms(view: UpdateView) -> list[tuple[OptimizerUpdate, float]]:
    """Return the looked-at steps with the norm of all gradients on the rank that has the largest.

    A rank of a sharded model knows the part of its shards only, which is smaller than the whole.
    """
    by_number: dict[int, tuple[OptimizerUpdate, float]] = {}
    for looks in view.by_rank.values():
        for look in looks:
            norm = norm_of(look)
            known = by_number.get(look.number)
            if known is None or not norm <= known[1]:
                by_number[look.number] = (look, norm)
    return [by_number[number] for number in sorted(by_number)]


def norm_of(look: OptimizerUpdate) -> float:
    """Return the norm of all gradients that a rank holds."""
    return sqrt(sum(each.gradient_norm**2 for each in look.tensors))


def module_norms(look: OptimizerUpdate) -> Mapping[str, float]:
    """Return the norm of the gradients of each part of a model that has more than one."""
    names = [each.name.split(".") for each in look.tensors]
    depth = 1
    while len({tuple(name[:depth]) for name in names}) == 1 and depth < max(map(len, names)):
        depth += 1
    squares: dict[str, float] = {}
    for name, each in zip(names, look.tensors, strict=True):
        module = ".".join(name[:depth])
        squares[module] = squares.get(module, 0.0) + each.gradient_norm**2
    return {module: sqrt(square) for module, square in squares.items() if isfinite(square)}
