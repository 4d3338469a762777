"""What ranks saw of numbered tokens, put side by side for each group of ranks."""

from __future__ import annotations

from typing import Final

from distdiag.engine.judges import Judges
from distdiag.engine.side_by_side import SideBySide
from distdiag.engine.watch import Watch
from distdiag.event import Event
from distdiag.ranks import RankSet
from distdiag.sequence_event import SequenceUnverified, TokenPassport

NOT_ASKED: Final = (
    "no numbered tokens were sent: --verify-sequence does, or distdiag.sequence.verify"
)


class SequenceWatch(Watch):
    """Feed events as they come; a passage is judged when all ranks of its group have told."""

    kinds = (TokenPassport, SequenceUnverified)

    def __init__(self, world: RankSet, judges: Judges) -> None:
        """Nothing was sent yet."""
        self._judges = judges
        self._events = SideBySide(world)
        self._told: set[int] = set()
        self._has_judged = False
        self._unverified: dict[str, str] = {}

    @property
    def not_checked(self) -> dict[str, str]:
        """The checks of sequences, if none was verified, or not what a library has."""
        ranks = RankSet(self._told)
        if self._unverified:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._unverified.items())
        elif self._has_judged:
            return {}
        else:
            why = f"only {ranks.phrase()} told what became of the tokens" if ranks else NOT_ASKED
        return {check.code: why for check in self._judges.needing(TokenPassport)}

    def feed(self, event: Event) -> None:
        """Take in one event of one rank."""
        if isinstance(event, SequenceUnverified):
            self._unverified.setdefault(event.name, event.reason)
            return
        self._told.add(event.rank)
        alignment = self._events.add(event)
        if alignment is not None:
            self._has_judged = True
            self._judges.judge(alignment)
