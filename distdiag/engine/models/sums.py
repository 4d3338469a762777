"""What layers add up over ranks, side by side."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from distdiag.checks.shd.repeated_shard import RepeatedSums
from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.bounded import SinceFirst
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PartsSummed
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

FEWEST: Final = 2
"""Shards may begin alike, by a constant; after a step they still do if nothing tells them apart."""
_NO_SUM: Final = NothingThere("sums over shards", "no layer added up parts over ranks")


_MOST_MODULES: Final = 4096
"""So many sums of modules are followed."""


@dataclass(slots=True)
class _Seen:
    """The steps at which ranks gave the same to one sum; or at one they did not."""

    alike: tuple[int, ...] = ()
    has_differed: bool = False


class SumAligner(Aligner):
    """Shows sums to which all ranks give the same, of the same weights, at each step."""

    needs = (PartsSummed, ProbeDisabled)
    builds = (RepeatedSums,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._open = SideBySide(job.world)
        self._seen: SinceFirst[str, _Seen]
        self._seen = SinceFirst(_MOST_MODULES, "sums over shards", job.forgotten)
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was no sum, or not all were seen."""
        if self._blind:
            reason = f"the sums of {RankSet(self._blind).phrase()} are not observed"
            return {RepeatedSums: NotObserved(reason)}
        if self._seen:
            return {}
        return {RepeatedSums: LIGHT if self.job.only_start else _NO_SUM}

    def feed(self, event: Event) -> Iterator[View]:
        """Take in what one rank adds."""
        if isinstance(event, ProbeDisabled):
            if event.probe == "summed-parts":
                self._blind.add(event.rank)
            return
        assert isinstance(event, PartsSummed)
        found = self._open.add(event)
        if found is None or len(found.by_rank) < 2:
            return
        seen = self._seen.find(event.place[0], _Seen)
        if seen is None or seen.has_differed or len(seen.alike) >= FEWEST:
            return  # it is forgotten, they have differed, or it has been said
        if len({(each.digest, each.weights) for each in found.by_rank.values()}) > 1:
            seen.has_differed = True
            return
        seen.alike += (event.step,)
        if len(seen.alike) == FEWEST:
            yield RepeatedSums(found.by_rank, seen.alike)
