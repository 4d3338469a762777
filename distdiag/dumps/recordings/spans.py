"""From where on the recordings of the ranks of a group are worth to be looked at.

Every recorder holds its rank's last calls only, so each begins somewhere else, and it may have been
dumped earlier than those of the peers. What is missing for one of these reasons was made all the
same, and must not be taken for a rank that never came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from distdiag.dumps.recordings.recording import DIGEST_BYTES, NO_SEQ, GroupWindow, Recording
from distdiag.event import ProcessGroup
from distdiag.ranks import RankSet

CLOCK_SKEW_NS: Final = 1_000_000_000


class Span(msgspec.Struct, frozen=True):
    """The collectives of one group that are shown: from `first` on, but not `after` to `until`.

    `stale_ranks` made those in between, as their peers know, and their recordings do not say so.
    """

    first: int
    after: int = 0
    until: int = 0
    stale_ranks: RankSet = RankSet()

    def holds(self, seq_id: int) -> bool:
        """Say whether a collective is shown."""
        return seq_id >= self.first and not self.after < seq_id <= self.until


def find_spans(
    recordings: Mapping[int, Recording],
    groups: Mapping[int, tuple[ProcessGroup, ...]],
    context: int,
) -> Mapping[ProcessGroup, Span]:
    """Return what to show of each group: what differs, and up to `context` collectives before.

    A group where nothing can be compared is left out.
    """
    windows: dict[ProcessGroup, dict[int, GroupWindow]] = {}
    for rank, recording in recordings.items():
        for group, window in zip(groups[rank], recording.windows, strict=True):
            if window.digests:
                windows.setdefault(group, {})[rank] = window
    spans = {}
    for group, own in windows.items():
        absent = [rank for rank in group.ranks if rank in recordings and rank not in own]
        begins = [_begin(group, own, recordings, groups, rank) for rank in absent]
        if None not in begins:
            first = max([window.first for window in own.values()] + [b for b in begins if b])
            spans[group] = _span(own, absent, first, context)
    return spans


def _begin(
    group: ProcessGroup,
    windows: Mapping[int, GroupWindow],
    recordings: Mapping[int, Recording],
    groups: Mapping[int, tuple[ProcessGroup, ...]],
    absent: int,
) -> int | None:
    """Return from where on a rank would hold the collectives of a group if it had made them."""
    if recordings[absent].first_id == 0:
        return 0
    oldest = next(recordings[absent].columns.rows(), None)
    if oldest is None:
        return None
    peer = min(windows)
    place = groups[peer].index(group)
    later = (
        seq_id
        for number, _, seq_id, _, time_ns in recordings[peer].columns.rows()
        if number == place and seq_id != NO_SEQ and time_ns > oldest[4] + CLOCK_SKEW_NS
    )
    return next(later, None)


def _span(windows: Mapping[int, GroupWindow], absent: list[int], first: int, context: int) -> Span:
    lasts = {rank: window.last for rank, window in windows.items()}
    lasts |= dict.fromkeys(absent, first - 1)
    proven = max(window.proven for window in windows.values())
    stale = RankSet(rank for rank, last in lasts.items() if last < proven)
    apart = _first_difference(windows, first, min(lasts.values()))
    return Span(
        first=max(first, apart - context),
        after=min((lasts[rank] for rank in stale), default=0),
        until=proven if stale else 0,
        stale_ranks=stale,
    )


def _first_difference(windows: Mapping[int, GroupWindow], first: int, last: int) -> int:
    """Return the first collective from `first` to `last` that the ranks disagree on, or the next.

    Digests of equal calls are equal bytes, so the common begin of all is found by halving.
    """
    if last < first:
        return first
    different = list({window.digests_of(first, last) for window in windows.values()})
    low, high = 0, last + 1 - first
    if len(different) == 1:
        return last + 1
    while low < high:
        middle = (low + high + 1) // 2
        if len({digests[: middle * DIGEST_BYTES] for digests in different}) == 1:
            low = middle
        else:
            high = middle - 1
    return first + low
