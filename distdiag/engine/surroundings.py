"""Puts what ranks run in side by side."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.events.base import Event
from distdiag.events.environment import NodeClock, Surroundings
from distdiag.views.base import View
from distdiag.views.surroundings import Facts, NodeClocksView, SurroundingsView

_NOT_TOLD: Final = NothingThere(
    "surroundings of ranks", "no two ranks have told in what surroundings they run"
)
_NO_OTHER_NODE: Final = NothingThere(
    "clocks of several nodes",
    "no two monitors compared the clocks of their nodes while it ran",
)


class SurroundingsAligner(Aligner):
    """Shows them when all ranks have told theirs, or at the end those of the ranks that have."""

    needs = (Surroundings,)
    builds = (SurroundingsView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._facts: dict[int, Facts] = {}
        self._is_shown = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was anything to compare."""
        return {} if self._is_shown else {SurroundingsView: _NOT_TOLD}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in those of one rank."""
        assert isinstance(event, Surroundings)
        facts = {(fact.kind, fact.name): fact.value for fact in event.facts}
        self._facts.setdefault(event.rank, facts)
        if not self._is_shown and self._facts.keys() >= set(self.job.world):
            yield self._view()

    def end(self) -> Iterator[View]:
        """Compare those who have told theirs."""
        if not self._is_shown and len(self._facts) > 1:
            yield self._view()

    def _view(self) -> SurroundingsView:
        self._is_shown = True
        return SurroundingsView(dict(sorted(self._facts.items())))


class NodeClocksAligner(Aligner):
    """Shows the wall clocks of the nodes whenever another one has told its own."""

    needs = (NodeClock,)
    builds = (NodeClocksView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._clocks: dict[int, NodeClock] = {}

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there were two to compare."""
        return {} if len(self._clocks) > 1 else {NodeClocksView: _NO_OTHER_NODE}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in that of one node; a monitor that was started again tells it again."""
        assert isinstance(event, NodeClock)
        self._clocks[event.rank] = event
        if len(self._clocks) > 1:
            yield NodeClocksView(dict(sorted(self._clocks.items())))
