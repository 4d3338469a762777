"""Whether queries, keys and values get the gradients of plain attention over whole rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.reasoning.token_gradients import common_scale
from distdiag.sequence_event import TokenPassport

_NAMES: Final = ("queries", "keys", "values")
_ROOM: Final[Mapping[str, float]] = {"bfloat16": 0.25, "float16": 0.04}
_LEAST_ROOM: Final = 4e-3


def softmax_gradient_faults(by_rank: Mapping[int, TokenPassport]) -> Iterator[TokenFault]:
    """Yield what differs, where the output of attention is right on all ranks.

    What split and gather do to gradients is known, and left out.
    """
    passports = list(by_rank.values())
    spec, due = passports[0].spec, passports[0].due_gradients
    before = common_scale(by_rank)
    if not before or not due or any(one.due_gradients != due for one in passports):
        return
    room = _ROOM.get(spec.dtype, _LEAST_ROOM)
    wrong: dict[str, float] = {}
    tokens: set[int] = set()
    for number, name in enumerate(_NAMES):
        whole = [
            sum(each) / before
            for each in zip(*(one.gradients[number] for one in passports), strict=True)
        ]
        apart = [found - wanted for found, wanted in zip(whole, due[number], strict=True)]
        size = _size(due[number])
        if _size(apart) > room * size:
            wrong[name] = _size(apart) / size
            least = room * size / math.sqrt(len(apart))
            tokens.update(token for token, each in enumerate(apart) if abs(each) > least)
    if wrong:
        shares = ", ".join(
            f"that of {name} by {share:.2g} of itself" for name, share in wrong.items()
        )
        yield TokenFault(
            kind=FaultKind.ATTENTION_GRADIENT,
            stage="attention gradient",
            ranks=tuple(by_rank),
            tokens=tuple(sorted(tokens)),
            said="the output is that of plain attention over whole rows, the gradient is not: it "
            f"differs at {tokens_phrase(spec, sorted(tokens))}, {shares}",
        )


def _size(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))
