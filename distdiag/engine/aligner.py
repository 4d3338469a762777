"""What watches one subject of a run for the engine, and has it judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from distdiag.engine.runner import Judges
from distdiag.events.base import Event
from distdiag.events.comparisons import Divergence, RoutingDifference

ONE_RUN = "there is one run only: distdiag parity compares it with another"
ONE_ROUTING = "there is one run only: distdiag moe-determinism compares it with the same again"


class Watch:
    """Fed with the events of its `kinds` as they come; judges at once what is complete."""

    kinds: ClassVar[tuple[type[Event], ...]]

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks that did not see all, and why."""
        return {}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""

    def finish(self) -> None:
        """Judge what not all ranks have told, at the end of the run."""


class Watches:
    """Several watches, each of which gets the events that it wants."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        """Feed these."""
        self._all = tuple(watches)
        self._by_kind: dict[type[Event], tuple[Watch, ...]] = {}

    @property
    def not_checked(self) -> dict[str, str]:
        """The codes of the checks that did not see all, and why."""
        return {code: why for watch in self._all for code, why in watch.not_checked.items()}

    def feed(self, event: Event) -> None:
        """Hand an event to those that want it."""
        kind = type(event)
        wanted = self._by_kind.get(kind)
        if wanted is None:
            wanted = tuple(watch for watch in self._all if issubclass(kind, watch.kinds))
            self._by_kind[kind] = wanted
        for watch in wanted:
            watch.feed(event)

    def finish(self) -> None:
        """Let all judge what is incomplete."""
        for watch in self._all:
            watch.finish()


class ComparedRuns(Watch):
    """Knows whether two runs were compared."""

    kinds = (Divergence, RoutingDifference)

    def __init__(self, judges: Judges, *, is_comparison: bool = False) -> None:
        """Nothing was compared yet, unless this `is_comparison` and nothing differs."""
        self._judges = judges
        self._has_compared = is_comparison

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of comparisons, if there was none."""
        if self._has_compared:
            return {}
        routing = {check.code: ONE_ROUTING for check in self._judges.needing(RoutingDifference)}
        return {check.code: ONE_RUN for check in self._judges.needing(Divergence)} | routing

    def feed(self, event: Event) -> None:
        """Take note of a comparison."""
        self._has_compared = True
