"""What the patterns of a plan match in a model, as events say it."""

from collections.abc import Iterable, Sequence
from typing import Final

from distdiag.config.placement_rules import closest
from distdiag.events.base import CallSite
from distdiag.events.models import NamedFault, PatternMatches, PlanPatterns, PlanSource
from distdiag.probes.base import Probe
from distdiag.record.recorder import Recorder

_MOST_PATTERNS: Final = 400
_MOST_NAMES: Final = 3
_MOST_FAULTS: Final = 8
_LONGEST: Final = 200


class PlanProbe(Probe):
    """Writes each outcome of a plan down once for each place that applies it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._reported: set[tuple[object, ...]] = set()

    def _tell(
        self, source: PlanSource, model: str, patterns: Iterable[PatternMatches], site: CallSite
    ) -> None:
        reported = tuple(patterns)[:_MOST_PATTERNS]
        key = (source, model, reported, site.location)
        if reported and key not in self._reported:
            self._reported.add(key)
            self.recorder.event(
                PlanPatterns, source=source, model=model, patterns=reported, site=site
            )


def outcome(
    pattern: str,
    wanted: str,
    found: Sequence[str],
    names: Iterable[str],
    faults: Sequence[NamedFault] = (),
) -> PatternMatches:
    """Return what became of a pattern that has found these, among all names."""
    return PatternMatches(
        pattern[:_LONGEST],
        wanted[:_LONGEST],
        len(found),
        tuple(found[:_MOST_NAMES]),
        "" if found else closest(pattern, names),
        tuple(faults[:_MOST_FAULTS]),
    )
