"""What hides a value that is not finite: an operation that is made for it, behind it in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.probes.untyped import Untyped

_MOST_NODES: Final = 20_000
_HIDING: Final = {
    "NanToNumBackward": "nan_to_num",
    "WhereBackward": "where",
    "MaskedFillBackward": "masked_fill",
    "NansumBackward": "nansum",
    "FmaxBackward": "fmax",
    "FminBackward": "fmin",
    "MaskedScatterBackward": "masked_scatter",
}
_PASSING: Final = (
    *("View", "UnsafeView", "Reshape", "Transpose", "Permute", "TBackward", "Unsqueeze", "Squeeze"),
    *("Expand", "Clone", "ToCopy", "Contiguous", "Alias", "Unbind", "Split", "Chunk", "Cat"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Exp", "Log", "Sqrt", "Pow", "Tanh", "Sigmoid", "Relu"),
    *("Gelu", "Silu", "NativeDropout", "RegisterPostBackward", "ViewAsReal", "ViewAsComplex"),
)
"""Operations that pass NaN on from one element to one, so that what comes after them hides it."""


def hiding_operation(node: Untyped, outputs: object) -> str:
    """Return the name of the operation that takes in what a node has made, empty if there is none.

    `outputs` are those of the backward pass; only operations on single elements may stand between.
    """
    users: dict[object, list[Untyped]] = {}
    for user in _nodes(outputs):
        for used, _ in user.next_functions:
            if used is not None:
                users.setdefault(used, []).append(user)
    waiting, seen = [node], {node}
    for each in waiting:  # it grows meanwhile
        for user in users.get(each, ()):
            name = user.name().rstrip("0123456789")
            if name in _HIDING:
                return _HIDING[name]
            if user not in seen and name.startswith(_PASSING):
                seen.add(user)
                waiting.append(user)
    return ""


def _nodes(outputs: object) -> Iterator[Untyped]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    waiting = [node for node in (getattr(t, "grad_fn", None) for t in tensors) if node is not None]
    seen = set(waiting)
    for node in waiting:  # it grows meanwhile
        yield node
        if len(waiting) < _MOST_NODES:
            further = [each for each, _ in node.next_functions if each is not None]
            fresh = [each for each in dict.fromkeys(further) if each not in seen]
            seen.update(fresh)
            waiting += fresh
