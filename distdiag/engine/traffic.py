"""How much a call carries, and which ranks get to know something of one another by it."""

from __future__ import annotations

import math
from typing import Final

from distdiag.event import Collective, Sizes

_ONE_WAY: Final = frozenset(("gather", "gather_object", "reduce", "barrier", "monitored_barrier"))
"""Collectives after which all but one rank know no more than before."""

_BYTES: Final = {"64": 8, "32": 4, "16": 2, "8": 1, "complex128": 16, "complex64": 8, "bool": 1}


def element_bytes(dtype: str) -> int:
    """Return the size of an element of a type such as ``bfloat16`` or ``float8_e4m3fn``."""
    name = dtype.rpartition(".")[2].partition("_")[0]
    if name in _BYTES:
        return _BYTES[name]
    return next((size for bits, size in _BYTES.items() if name.endswith(bits)), 8)


def carried_bytes(call: Collective, ranks: frozenset[int]) -> int:
    """Return how many bytes a call carries between at least two of these ranks."""
    signature = call.signature
    if signature.op in _ONE_WAY:
        return 0
    if signature.peer is not None:
        told = ranks & {call.rank, signature.peer}
    else:
        told = ranks.intersection(call.group.ranks)
    if len(told) < 2:
        return 0
    size = max(_num_elements(signature.input_sizes), _num_elements(signature.output_sizes))
    return size * max(map(element_bytes, signature.dtypes), default=8)


def _num_elements(sizes: Sizes) -> int:
    return sum(math.prod(each) for each in sizes)
