"""Parameters whose gradients the program sums over ranks but for some that it seems to forget.

A rank may well train some parameters for itself: a head, its last layers, or all of one kind, such
as norms. What is left out is meant to be summed where neither is the case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from distdiag.gradient_view import Sum, SumsView
from distdiag.reasoning.experts import is_of_expert, routers_in

FEWEST_LOOKS: Final = 3
FEWEST_SUMMED: Final = 3
_NUMBER: Final = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def summed_in(view: SumsView) -> tuple[str, ...]:
    """Return the parameters that are summed at all looks, and whose copies stay equal."""
    return tuple(_all_are(view, Sum.SUMMED, view.sums.keys() - view.apart))


def forgotten_in(view: SumsView) -> tuple[str, ...]:
    """Return the parameters whose gradients are never summed although they should be."""
    plans = {name: plan for name, plan in view.plans.items() if not is_of_expert(plan)}
    summed = summed_in(view)
    own = set(_all_are(view, Sum.OWN, view.apart & plans.keys()))
    is_regular = all(len(set(view.sums[name])) <= 1 for name in plans)
    is_minority = len(summed) >= FEWEST_SUMMED and 2 * len(own) <= len(summed)
    if view.has_shards or not is_regular or not is_minority:
        return ()
    torn = {name for name in own if _is_torn_out(view, name, summed)}
    routers = own & routers_in(tuple(view.plans.values()))
    # Who trains gates and other parts for itself has tasks of its own.
    return tuple(sorted(torn | routers if own == torn | routers else torn))


def doubt_of(view: SumsView, names: Sequence[str]) -> str:
    """Say why these may be meant to be left out all the same."""
    if view.is_more_sent:
        return "more was sent between them in a later step"
    has_own = any(is_of_expert(view.plans[name]) for name in view.apart & view.plans.keys())
    if has_own and routers_in(tuple(view.plans.values())) >= set(names):
        return "each rank trains experts for itself, too, which were the same at first"
    return ""


def _all_are(view: SumsView, wanted: Sum, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names):
        sums = view.sums[name]
        if len(sums) >= FEWEST_LOOKS and set(sums) == {wanted}:
            yield name


def _is_torn_out(view: SumsView, name: str, summed: Sequence[str]) -> bool:
    """Say whether both others of its kind and others in each of its blocks are summed."""
    mine, kind = view.plans[name], _NUMBER.sub("#", name)
    beside = [other for other in summed if view.plans[other].owners == mine.owners]
    kin = [o for o in beside if _NUMBER.sub("#", o) == kind and view.plans[o].shape == mine.shape]
    blocks = [name[: match.end() + 1] for match in _NUMBER.finditer(name)]
    return bool(kin) and all(any(o.startswith(block) for o in beside) for block in blocks)
