"""Which ranks train without anything that connects them, though they were launched together."""

from __future__ import annotations

from distdiag.alignment import Alignment
from distdiag.engine.judges import Judges
from distdiag.engine.watch import Watch
from distdiag.event import Collective, Event, GroupCreated, ProbeDisabled, SteppedAlone
from distdiag.ranks import RankSet


class LoneSteps(Watch):
    """Judges ranks that stepped alone, once all have or at the end, and never met before or since.

    A group that was made before is none that connects them: their library may not use it.
    """

    kinds = (Collective, GroupCreated, ProbeDisabled, SteppedAlone)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Nobody has stepped yet."""
        self._world = world
        self._judges = judges
        self._alone: dict[int, SteppedAlone] = {}
        self._connected: set[int] = set()
        self._blind: set[int] = set()

    @property
    def not_checked(self) -> dict[str, str]:
        """The check of first steps, if those of some rank were not seen."""
        if not self._blind:
            return {}
        why = f"the steps of {RankSet(self._blind).phrase()} are not observed"
        return {check.code: why for check in self._judges.needing(SteppedAlone)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        match event:
            case SteppedAlone():
                self._alone[event.rank] = event
                if self._alone.keys() >= set(self._world):
                    self._judge()
            case ProbeDisabled(probe="steps"):
                self._blind.add(event.rank)
            case Collective():
                self._connect(event.rank)
            case GroupCreated() if event.rank in self._alone:
                self._connect(event.rank)

    def finish(self) -> None:
        """Judge those that stepped, though others never did."""
        if self._alone:
            self._judge()

    def _connect(self, rank: int) -> None:
        if rank not in self._connected:
            self._connected.add(rank)
            if rank in self._alone:
                self._judge()

    def _judge(self) -> None:
        alone = {r: e for r, e in sorted(self._alone.items()) if r not in self._connected}
        self._judges.judge_lone_steps(Alignment("step", ("first",), alone, self._world))
