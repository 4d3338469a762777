"""How differences read, and their form for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from distdiag.comparison.differences import Difference
from distdiag.comparison.facts import ARGUMENT, OPTION, PLAN
from distdiag.events.environment import FactKind
from distdiag.record.visible import json_text, visible

_TITLES: Final = {
    FactKind.VARIABLE: "environment variable",
    FactKind.VERSION: "version of",
    FactKind.DEVICE: "",
    FactKind.SETTING: "setting",
    FactKind.SEED: "seed of",
    FactKind.CODE: "",
    FactKind.LAUNCH: "",
    ARGUMENT: "argument",
    OPTION: "distdiag option",
    PLAN: "plan of",
    "trace": "",
    "outcome": "",
}
_MOST_SHOWN: Final = 20
_MOST_DETAILS: Final = 8
_LONGEST: Final = 160


def text_of(differences: Sequence[Difference], names: tuple[str, str], *, is_all: bool) -> str:
    """Return all differences, or the first twenty, a paragraph each."""
    if not differences:
        return f"{visible(names[0])} and {visible(names[1])}: nothing that was recorded differs.\n"
    shown = differences if is_all else differences[:_MOST_SHOWN]
    number = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
    between = visible(f"{names[0]} and {names[1]}")
    lines = [f"{number} between {between}, the likely causes first:", ""]
    for place, each in enumerate(shown, 1):
        lines += _paragraph(place, each, is_all=is_all)
    if len(shown) < len(differences):
        lines += ["", f"{len(differences) - len(shown)} more: --all shows them."]
    return "\n".join(lines) + "\n"


def _paragraph(place: int, each: Difference, *, is_all: bool) -> Iterator[str]:
    where = f" ({each.ranks.phrase()})" if each.ranks else ""
    title = title_of(each)
    if each.kind == "trace":
        when = "before the first step" if each.step == -1 else f"at step {each.step}"
        yield f"{place:3}. {visible(title)} first differ {when}{where}"
        if "learning rate" not in each.name:
            return
    else:
        yield f"{place:3}. {visible(title)}{where}"
    if each.kind != FactKind.CODE or not each.details:
        yield f"       {_shown(each.before)}  ->  {_shown(each.after)}"
    details = each.details if is_all else each.details[:_MOST_DETAILS]
    for line in details:
        yield f"       {_shown(line)}"
    if len(details) < len(each.details):
        yield f"       ... and {len(each.details) - len(details)} more"


def title_of(each: Difference) -> str:
    """Return what differs, such as ``argument --lr``."""
    return " ".join(filter(None, (_TITLES.get(each.kind, each.kind), each.name)))


def _shown(value: str) -> str:
    if not value:
        return "(none)"
    text = visible(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def json_of(differences: Iterable[Difference], names: tuple[str, str]) -> str:
    """Return ``{"before": …, "after": …, "differences": […]}``."""
    found: list[dict[str, Any]] = [
        {
            "kind": each.kind,
            "name": each.name,
            "before": each.before,
            "after": each.after,
            "ranks": list(each.ranks),
            "step": each.step,
            "details": list(each.details),
        }
        for each in differences
    ]
    whole = {"before": names[0], "after": names[1], "differences": found}
    return json_text(whole)
