"""Whether two runs were compared."""

from collections.abc import Mapping
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.events.base import Event
from distdiag.events.comparisons import Divergence, RoutingDifference
from distdiag.views.base import View

_ONE_RUN: Final = NothingThere(
    "a second run", "there is one run only: distdiag parity compares it with another"
)
_ONE_ROUTING: Final = NothingThere(
    "a second run",
    "there is one run only: distdiag moe-determinism compares it with the same again",
)


class ComparisonAligner(Aligner):
    """Builds nothing: what differs is an event, which checks judge by itself."""

    needs = (Divergence, RoutingDifference)
    builds = (Divergence, RoutingDifference)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._has_compared = False

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was but one run."""
        if self._has_compared:
            return {}
        return {Divergence: _ONE_RUN, RoutingDifference: _ONE_ROUTING}

    def feed(self, event: Event) -> tuple[()]:
        """Take note of a comparison."""
        self._has_compared = True
        return ()
