"""Shows exceptions that ended a pass on some ranks, and after which these went on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.col.lone_exception import BrokenPassView
from distdiag.engine.aligner import Aligner, Gap, Job, NothingThere
from distdiag.engine.bounded import MOST_FOLLOWED, Recent
from distdiag.events.base import Event
from distdiag.events.lifecycle import BrokenPass, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.views.base import View

_NONE: Final = NothingThere("caught exceptions", "no exception was seen to end a pass")


class BrokenPassAligner(Aligner):
    """Waits until a rank has stepped again, and all others have come to that step."""

    needs = (BrokenPass, StepEnd)
    builds = (BrokenPassView,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._broken: Recent[int, dict[int, BrokenPass]] = Recent(MOST_FOLLOWED)
        self._last: dict[int, StepEnd] = {}
        self._shown: set[int] = set()

    def feed(self, event: Event) -> Iterator[View]:
        """Take in one event of one rank."""
        if isinstance(event, StepEnd):
            self._last[event.rank] = event
            if self._broken:
                yield from self._views(is_over=False)
        elif isinstance(event, BrokenPass):
            self._broken.of(event.step, dict).setdefault(event.rank, event)

    def end(self) -> Iterator[View]:
        """Show also steps that not all ranks have reached."""
        yield from self._views(is_over=True)

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say whether any pass was broken."""
        return {} if self._broken else {BrokenPassView: _NONE}

    def _views(self, *, is_over: bool) -> Iterator[View]:
        reached = {
            rank: self._last[rank].step if rank in self._last else -1 for rank in self.job.world
        }
        for step, by_rank in self._broken.items():
            if step in self._shown or not (is_over or min(reached.values()) > step):
                continue
            self._shown.add(step)
            caught = {rank: each for rank, each in by_rank.items() if self._went_on(each)}
            others = RankSet(set(self.job.world) - by_rank.keys())
            if caught and others:
                yield BrokenPassView(dict(sorted(caught.items())), others)

    def _went_on(self, broken: BrokenPass) -> bool:
        last = self._last.get(broken.rank)
        return last is not None and last.seq > broken.seq
