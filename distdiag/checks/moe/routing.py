"""How findings describe choices of experts."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from distdiag.events.routing import Routing

_MOST_NAMES: Final = 3
_HALVING: Final = re.compile(
    r"^(?=.*(count|token|load|usage|expert)).*(//?=? *2\b|sign\()", re.M | re.I
)


def layer_names(events: Iterable[Routing]) -> str:
    """Return the names of the layers, of many only the first ones."""
    names = list(dict.fromkeys(event.layer or "the model itself" for event in events))
    shown = ", ".join(names[:_MOST_NAMES])
    rest = len(names) - _MOST_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def by_routers(choices: Sequence[Routing]) -> list[Routing]:
    """Leave out what a module chooses around others that choose.

    A model that computes its auxiliary loss chooses the best experts once more, and sends no token
    there.
    """
    layers = {event.layer for event in choices}
    around = {outer for outer in layers if any(_encloses(outer, inner) for inner in layers)}
    return [event for event in choices if event.layer not in around]


def _encloses(outer: str, inner: str) -> bool:
    return outer != inner and (not outer or inner.startswith(f"{outer}."))


def choice_phrase(event: Routing) -> str:
    """Return ``2 of 8 experts for each of 64 tokens by topk of float32``."""
    choice = event.choice
    return (
        f"{choice.k} of {choice.num_experts} experts for each of {choice.num_tokens} tokens "
        f"by {choice.api} of {choice.dtype}"
    )


def boundary_phrase(event: Routing) -> str:
    """Say how many tokens hardly prefer their last expert to the next one."""
    if event.tie_share < 0:
        return "how close the scores are is not known"
    return (
        f"{event.tie_share:.1%} of the tokens have equal scores at the boundary, "
        f"{event.near_share:.1%} almost equal ones"
    )


def mentions_halving(file: str) -> bool:
    """Say whether a source file halves a count, or looks at its sign only."""
    try:
        return bool(_HALVING.search(Path(file).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False
