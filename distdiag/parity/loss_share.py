"""Which part of a loss differs: that which reaches the parameters whose gradients differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distdiag.disparity import Difference


class Share(NamedTuple):
    """The gradients that differ, in backward order, and what they tell of the loss."""

    differing: tuple[Difference, ...]
    explanation: str


def share_of(gradients: Sequence[Difference]) -> Share | None:
    """Tell the part of the loss that is weighed otherwise; None if it may be all of it.

    What an auxiliary loss of a router adds reaches the router and what lies before it, and
    nothing behind it.
    """
    differing = tuple(each for each in gradients if each.ratio > 1)
    agreeing = [each.name for each in gradients if each.ratio <= 1 and each.bound > 0]
    if not differing or not agreeing:
        return None
    named = [name.partition("/")[2] or name for name in (differing[0].name, agreeing[0])]
    return Share(
        differing,
        f"only a part of it is weighed otherwise, one that reaches {named[0]}, the first of "
        f"{len(differing)} parameters in backward order whose gradients differ, and not "
        f"the {len(agreeing)} whose gradients agree, such as {named[1]}",
    )
