"""What every view has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from typing import ClassVar, TypeVar


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

    def narrowed(self, kind: type[N]) -> N:
        """Return the same view as one of a narrower type, which only some checks judge."""
        return kind(*(getattr(self, field.name) for field in fields(self)))  # type: ignore[arg-type]


N = TypeVar("N", bound=View)
