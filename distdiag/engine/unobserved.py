"""What nobody observes: ranks of a run that write nothing, and what the probes of others lack."""

from __future__ import annotations

from typing import Any

from distdiag.engine.watch import Watch
from distdiag.event import Event, GroupCreated, ProcessesSpawned, Unobserved
from distdiag.ranks import RankSet


class UnobservedRanks:
    """Feed it all events; `ranks` are those beyond the world that the monitors read.

    A script may start ranks by itself: Lightning runs it again for each further rank, and
    ``torch.multiprocessing.spawn`` leaves no rank to the process that was started through distdiag.
    """

    def __init__(self, world: RankSet) -> None:
        """Expect nobody beside these ranks."""
        self.ranks = RankSet()
        self._world = world
        self._is_member = False

    def feed(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case GroupCreated() if event.has_processes:
                before = self.ranks if self._is_member else RankSet()
                self._is_member = True
                # Smaller groups are parts of the one whose scope is the whole job.
                scope = event.scope if len(event.scope) > len(self._world) else ()
                self.ranks = RankSet({*before, *scope} - set(self._world))
            case ProcessesSpawned() if len(self._world) == 1 and not self._is_member:
                self.ranks = RankSet(range(max(event.number, len(self.ranks))))

    @property
    def reason(self) -> str:
        """Why the ranks that were observed were compared with nobody; empty if they were."""
        if not self.ranks or len(self._world) > 1:
            return ""
        observed = self._world - self.ranks
        return (
            f"only {RankSet(observed).phrase()} was observed and not {self.ranks.phrase()}, so no "
            "ranks were compared"
            if observed
            else f"{self.ranks.phrase()} were not observed, so no ranks were compared"
        )


class UnobservedThings(Watch):
    """Lists each once, with the ranks that said so."""

    kinds = (Unobserved,)

    def __init__(self, *_: Any) -> None:  # noqa: ANN401 (it judges nothing)
        """Nothing is missed yet."""
        self._ranks: dict[tuple[str, str, str], set[int]] = {}

    @property
    def not_checked(self) -> dict[str, str]:
        """What is not observed, and why."""
        reasons: dict[str, list[str]] = {}
        for (what, probe, reason), ranks in self._ranks.items():
            text = f"probe {probe} of {RankSet(ranks).phrase()} does not observe it: {reason}"
            reasons.setdefault(what, []).append(text)
        return {what: "; ".join(texts) for what, texts in reasons.items()}

    def feed(self, event: Unobserved) -> None:  # type: ignore[override]
        """Take note of what a rank does not see."""
        key = event.what, event.probe, event.reason
        self._ranks.setdefault(key, set()).add(event.rank)
