"""Align the collectives of each process group by `collective_seq_id`."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.alignment import Alignment
from distdiag.event import CallSite, Collective, Frame, ProcessGroup
from distdiag.ranks import RankSet

GroupKey = tuple[str, int, tuple[int, ...]]
CollectiveAlignment = Alignment[Collective]


def group_key(group: ProcessGroup) -> GroupKey:
    """Tell groups apart: names are used again after a new initialisation."""
    return (group.name, group.generation, group.ranks)


class Places:
    """The part of a call site that two ranks are compared by: the user's frames and the module."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._by_site: dict[int, tuple[CallSite, tuple[tuple[Frame, ...], str | None]]] = {}

    def of(self, site: CallSite) -> tuple[tuple[Frame, ...], str | None]:
        """Return the place of a call site."""
        known = self._by_site.get(id(site))
        if known is None:
            # The site itself is kept, so that its id stays its own.
            known = self._by_site[id(site)] = (site, (site.user_frames, site.module))
        return known[1]


class GroupStream:
    """The collectives of one process group, as far as they are not settled."""

    def __init__(self, group: ProcessGroup, world: RankSet, places: Places) -> None:
        """Start with nothing seen; only the ranks of `world` are observed."""
        self.group = group
        self.ranks = RankSet(set(group.ranks) & set(world))
        self.broken = False
        self.parted: CollectiveAlignment | None = None
        self._places = places
        self._open: dict[int, dict[int, Collective]] = {}
        self._known: set[tuple[tuple[int, int, int], ...]] = set()

    def add(self, call: Collective) -> CollectiveAlignment | None:
        """Take in one call; return the alignment if it completes one that the ranks disagree on."""
        seq_id = call.collective_seq_id
        by_rank = self._open.setdefault(seq_id, {})
        by_rank[call.rank] = call
        if len(by_rank) < len(self.ranks):
            return None
        del self._open[seq_id]
        if self.broken or self._agree(by_rank):
            return None
        pattern = tuple(sorted((rank, id(c.signature), id(c.site)) for rank, c in by_rank.items()))
        alignment = self._alignment(seq_id, by_rank)
        seen_before = pattern in self._known
        self._known.add(pattern)
        self._part(alignment)
        return None if seen_before else alignment

    def _agree(self, by_rank: dict[int, Collective]) -> bool:
        first, *others = by_rank.values()
        place = self._places.of(first.site)
        if any(self._places.of(other.site) != place for other in others):
            return False
        self.parted = None
        return all(other.signature is first.signature for other in others)

    def _part(self, alignment: CollectiveAlignment) -> None:
        """Remember where the call sites parted, until they meet again."""
        if len({self._places.of(call.site) for call in alignment.by_rank.values()}) == 1:
            self.parted = None
        elif self.parted is None:
            self.parted = alignment

    def _alignment(self, seq_id: int, by_rank: dict[int, Collective]) -> CollectiveAlignment:
        return Alignment(
            kind="collective",
            key=(self.group.label, seq_id),
            by_rank=dict(sorted(by_rank.items())),
            expected_ranks=self.ranks,
            parted=self.parted,
        )

    def first_open(self) -> CollectiveAlignment | None:
        """Return the first point that not all ranks have reached."""
        if self.broken or not self._open:
            return None
        seq_id = min(self._open)
        return self._alignment(seq_id, self._open[seq_id])

    def waiting(self, rank: int) -> Iterator[Collective]:
        """Yield the calls of a rank that other ranks have not made yet."""
        for by_rank in self._open.values():
            if rank in by_rank:
                yield by_rank[rank]


class CollectiveStreams:
    """All process groups of a run."""

    def __init__(self, world: RankSet) -> None:
        """Start with no group; only the ranks of `world` are observed."""
        self._world = world
        self._places = Places()
        self._streams: dict[GroupKey, GroupStream] = {}

    def leave_out(self, rank: int) -> None:
        """Expect nothing of a rank: it runs, and is not observed."""
        self._world = RankSet(set(self._world) - {rank})

    def stream(self, group: ProcessGroup) -> GroupStream:
        """Return the stream of a group, made at its first call."""
        key = group_key(group)
        if key not in self._streams:
            self._streams[key] = GroupStream(group, self._world, self._places)
        return self._streams[key]

    def all(self) -> tuple[GroupStream, ...]:
        """Return every group's stream, in order of their first calls."""
        return tuple(self._streams.values())

    def same_place(self, alignment: CollectiveAlignment) -> bool:
        """Whether all ranks made the call at one place of the program."""
        return len({self._places.of(call.site) for call in alignment.by_rank.values()}) == 1
