"""What every view has."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from itertools import chain
from typing import ClassVar, Final, NamedTuple, TypeVar

from distdiag.events.base import Event
from distdiag.events.models import ObjectKind


class View:
    """Events of ranks, put side by side by an aligner and judged by the checks that name its type.

    Views are frozen. An event is a view too, of one rank.
    """

    __slots__ = ()

    is_of_one_rank: ClassVar[bool] = False
    """Whether a check can judge it although only one rank is observed."""

    @property
    def supersedes(self) -> Hashable | None:
        """What a check said of an earlier view with the same value here is replaced.

        None: the view stands for itself, and what was said before stays.
        """
        return None

    @property
    def things(self) -> tuple[Thing, ...]:
        """What it is of that the program has made, as its fields name it."""
        return things_in(self)

    def narrowed(self, kind: type[N]) -> N:
        """Return the same view as one of a narrower type, which only some checks judge."""
        return kind(*(getattr(self, field.name) for field in fields(self)))  # type: ignore[arg-type]


N = TypeVar("N", bound=View)


# What views name.

_FIELDS: Final = {
    "model": (ObjectKind.MODEL,),
    "copied_model": (ObjectKind.MODEL,),
    "optimizer": (ObjectKind.OPTIMIZER,),
    "stream": (ObjectKind.LOADER, ObjectKind.SAMPLER),
    "group": (ObjectKind.GROUP,),
}


class Thing(NamedTuple):
    """What a program has made, by the name that events give it."""

    kind: ObjectKind
    name: str


def things_in(seen: object) -> tuple[Thing, ...]:
    """Return what a view or an event names: itself, or the events that it holds `by_rank`."""
    by_rank = getattr(seen, "by_rank", None)
    held = by_rank.values() if isinstance(by_rank, Mapping) else ()
    events = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in held)
    found: dict[Thing, None] = {}
    for each in (seen, *(event for event in events if isinstance(event, Event))):
        for field, kinds in _FIELDS.items():
            value = getattr(each, field, "")
            name = getattr(value, "label", value)  # of a process group
            if isinstance(name, str) and name:
                found |= {Thing(kind, name): None for kind in kinds}
    return tuple(found)
