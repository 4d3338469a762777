"""Parameters whose gradients the program sums over ranks but for some that it seems to forget.

A rank may well train some parameters for itself: a head, its last layers, or all of one kind, such
as norms. What is left out is meant to be summed where neither is the case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    is_regular = all(len(set(view.sums[name])) == 1 for name in plans)
    num_looks = min(map(len, view.sums.values()), default=0)
    is_minority = 2 * len(own) <= len(summed)
    if not is_regular or not is_minority or num_looks < FEWEST_LOOKS or len(summed) < FEWEST_SUMMED:
        return ()
    torn = {name for name in own if _is_torn_out(view, name, summed)}
    routers = own & routers_in(tuple(view.plans.values()))
    # Who trains gates and other parts for itself has tasks of its own.
    return tuple(sorted(torn | routers if own == torn | routers else torn))


def _all_are(view: SumsView, wanted: Sum, names: set[str] | frozenset[str]) -> Iterator[str]:
    yield from (name for name in sorted(names) if set(view.sums[name]) == {wanted})


def _is_torn_out(view: SumsView, name: str, summed: tuple[str, ...]) -> bool:
    """Say whether both others of its kind and others in each of its blocks are summed."""
    kind, shape = _NUMBER.sub("#", name), view.plans[name].shape
    blocks = [name[: match.end() + 1] for match in _NUMBER.finditer(name)]
    has_kin = any(
        _NUMBER.sub("#", other) == kind and view.plans[other].shape == shape for other in summed
    )
    return has_kin and all(any(o.startswith(block) for o in summed) for block in blocks)
