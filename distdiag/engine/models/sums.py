"""What layers add up over ranks, side by side."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.shd.repeated_shard import RepeatedSums
from distdiag.engine.aligner import LIGHT, Aligner, Gap, Job, NothingThere, NotObserved
from distdiag.engine.side_by_side import SideBySide
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import PartsSummed
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

FEWEST: Final = 2
"""Shards may begin alike, by a constant; after a step they still do if nothing tells them apart."""
_NO_SUM: Final = NothingThere("sums over shards", "no layer added up parts over ranks")


class SumAligner(Aligner):
    """Shows sums to which all ranks give the same, of the same weights, at each step."""

    needs = (PartsSummed, ProbeDisabled)
    builds = (RepeatedSums,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._open = SideBySide(job.world)
        self._alike: dict[str, tuple[int, ...]] = {}
        self._blind: set[int] = set()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether there was no sum, or not all were seen."""
        if self._blind:
            reason = f"the sums of {RankSet(self._blind).phrase()} are not observed"
            return {RepeatedSums: NotObserved(reason)}
        if self._alike:
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
        name, _ = event.place
        if len({(each.digest, each.weights) for each in found.by_rank.values()}) > 1:
            self._alike[name] = ()
            return
        before = self._alike.get(name)
        if before == () or len(before or ()) >= FEWEST:
            return  # they have differed, or it has been said
        self._alike[name] = (*(before or ()), event.step)
        if len(self._alike[name]) == FEWEST:
            yield RepeatedSums(found.by_rank, self._alike[name])
