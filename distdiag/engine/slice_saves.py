"""Saves of parts of sharded parameters, of all ranks that hold parts."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.alignment import Alignment
from distdiag.model_event import SliceSaved
from distdiag.ranks import RankSet

SaveAlignment = Alignment[SliceSaved]


class SliceSaves:
    """Collect who saved its parts; that some did not is only certain at the end."""

    def __init__(self) -> None:
        """Nothing was saved yet."""
        self._saves: dict[int, SliceSaved] = {}

    def add(self, event: SliceSaved) -> None:
        """Take in one event."""
        self._saves.setdefault(event.rank, event)

    def incomplete(self) -> Iterator[SaveAlignment]:
        """Yield the save, if of no set of ranks that make up the whole all have saved."""
        if not self._saves or any(
            self._saves.keys() >= set(event.members) for event in self._saves.values()
        ):
            return
        first = self._saves[min(self._saves)]
        yield Alignment("save", first.names, self._saves, RankSet(first.members))
