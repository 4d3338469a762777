"""What the flight recorders of all ranks tell together, as events.

A recorder holds thousands of calls, and most are the same on every rank. These are compared by
digests; events are made only from shortly before the first point where the ranks differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from distdiag.dumps.flight_recorder.names import refined_op
from distdiag.dumps.flight_recorder.recording import (
    COMPLETED,
    DIGEST_BYTES,
    NO_SEQ,
    PENDING,
    RETIRED,
    GroupWindow,
    RecordedGroup,
    Recording,
    Tables,
)
from distdiag.events.base import CallSite, Event
from distdiag.events.collectives import (
    Collective,
    CollectiveState,
    GroupProgress,
    ProcessGroup,
    Signature,
)
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.record.wire import Interner

# Which ranks the process groups of recordings have, also where a dump does not say it.
#
# NCCL writes the ranks of a group when it is first used. Gloo writes none: the group has no name
# yet when it is made, and later its list is empty.

MOST_RANKS: Final = 1 << 20

_Key = tuple[str, str, str]
_NUMBER: Final = re.compile(r"\d{1,7}")


def resolve_groups(recordings: Mapping[int, Recording]) -> Mapping[int, tuple[ProcessGroup, ...]]:
    """Return for each rank its groups, at the places of `Recording.groups`.

    A group whose ranks nobody wrote down has all ranks if it is the default group, and else those
    that used it.
    """
    known: dict[_Key, list[tuple[int, ...]]] = {}
    users: dict[_Key, list[int]] = {}
    for rank, recording in sorted(recordings.items()):
        for group in recording.groups:
            users.setdefault(group.key, []).append(rank)
            ranks = _ranks_of(group.ranks)
            if rank in ranks and ranks not in known.setdefault(group.key, []):
                known[group.key].append(ranks)
    largest = max((r for lists in known.values() for ranks in lists for r in ranks), default=0)
    world = tuple(range(max(largest, *recordings, 0) + 1))
    share_names = len({key[2] for key in users}) > 1
    made: dict[tuple[_Key, tuple[int, ...]], ProcessGroup] = {}

    def resolved(rank: int) -> Iterator[ProcessGroup]:
        for group in recordings[rank].groups:
            listed = next((ranks for ranks in known.get(group.key, ()) if rank in ranks), None)
            ranks = listed or (world if _is_default(group) else tuple(users[group.key]))
            name = f"{group.name}/{group.backend}" if share_names else group.name
            fresh = ProcessGroup(name, group.desc, ranks, group.backend)
            yield made.setdefault((group.key, ranks), fresh)

    return {rank: tuple(resolved(rank)) for rank in recordings}


def _is_default(group: RecordedGroup) -> bool:
    return group.desc == "default_pg" or (group.name == "0" and group.desc in ("", "undefined"))


@lru_cache(maxsize=4096)
def _ranks_of(text: str) -> tuple[int, ...]:
    """Read ``[0, 1, 2]``; nothing comes of a list that makes no sense."""
    ranks = tuple(int(number) for number in _NUMBER.findall(text))
    return ranks if ranks and max(ranks) < MOST_RANKS and len(set(ranks)) == len(ranks) else ()


# From where on the recordings of the ranks of a group are worth to be looked at.
#
# Every recorder holds its rank's last calls only, so each begins somewhere else, and it may have
# been dumped earlier than those of the peers. What is missing for one of these reasons was made
# all the same, and must not be taken for a rank that never came.

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


# Puts the recordings of all ranks together as events.

MOST_EVENTS: Final = 100_000
LEAST_CONTEXT: Final = 64
"""So many collectives of each group before the first difference are shown at least."""

_STALE: Final = "its dump is older than those of its peers, which saw it come to later calls"
_Call = tuple[Signature, CallSite, str | None]


class RecordedRun:
    """The recordings of all ranks that left one."""

    def __init__(self, recordings: Mapping[int, Recording]) -> None:
        """Take the recordings by rank and find where they differ."""
        self._recordings = recordings
        self._groups = resolve_groups(recordings)
        context = max(LEAST_CONTEXT, MOST_EVENTS // max(1, len(recordings)))
        self._spans = find_spans(recordings, self._groups, context)
        self._knows_starts = any(recording.knows_starts for recording in recordings.values())
        self._is_whole = all(recording.first_id == 0 for recording in recordings.values())
        # Operations are told apart by the functions that made them on all ranks or on none.
        self._refines = all(recording.has_stacks for recording in recordings.values())
        self._canon = Interner()
        self._tables: dict[bytes, Sequence[_Call]] = {}

    @property
    def members(self) -> RankSet:
        """All ranks that a group names, whether they left a recording or not."""
        groups = {group for own in self._groups.values() for group in own}
        return RankSet([*self._recordings, *(rank for group in groups for rank in group.ranks)])

    @property
    def is_waiting(self) -> bool:
        """Whether a rank made a call that had not ended when its recorder was dumped."""
        return any(
            not _has_ended(state, groups[place])
            for rank, groups in self._groups.items()
            for place, _, _, state, _ in self._recordings[rank].columns.rows()
        )

    def events(self, rank: int) -> Iterator[Event]:
        """Yield what one rank did, in its order, as far as it is shown."""
        recording, groups = self._recordings[rank], self._groups[rank]
        spans = [self._spans.get(group) for group in groups]
        if any(span is not None and rank in span.stale_ranks for span in spans):
            yield ProbeDisabled(rank=rank, seq=-1, time_ns=0, probe="collectives", reason=_STALE)
        yield from self._progress(rank)
        calls = self._calls(recording.tables)
        last: Collective | None = None
        last_state = PENDING
        for seq, (place, call, seq_id, state, time_ns) in enumerate(recording.columns.rows()):
            span = spans[place]
            if seq_id == NO_SEQ:
                # Which messages the peer has forgotten is not known: those that ended are paired.
                is_shown = state == PENDING or self._is_whole
            else:
                is_shown = span is not None and span.holds(seq_id)
            if is_shown:
                signature, site, api = calls[call]
                last, last_state = (
                    Collective(
                        rank=rank,
                        seq=seq,
                        time_ns=time_ns,
                        group=groups[place],
                        collective_seq_id=seq_id,
                        signature=self._with_peer(signature, groups[place]),
                        site=site,
                        api=api,
                    ),
                    state,
                )
                yield last
        if last is not None and _has_ended(last_state, last.group):
            yield CollectiveState(
                rank=rank, seq=last.seq, time_ns=last.time_ns, call=last.seq, state="completed"
            )

    def _progress(self, rank: int) -> Iterator[GroupProgress]:
        """Yield which calls have ended on a rank in each group whose calls are shown."""
        recording = self._recordings[rank]
        for group, window in zip(self._groups[rank], recording.windows, strict=True):
            if group in self._spans and window.digests:
                ended = window.last if window.unended < 0 else window.unended - 1
                started = max(window.started, ended) if self._knows_starts else None
                yield GroupProgress(
                    rank=rank,
                    seq=-1,
                    time_ns=0,
                    group=group,
                    completed=ended,
                    started=started,
                )

    def _calls(self, data: bytes) -> Sequence[_Call]:
        known = self._tables.get(data)
        if known is None:
            tables = msgspec.msgpack.decode(data, type=Tables)
            known = self._tables[data] = [
                (
                    self._canon(self._refined(call.signature, call.api)),
                    self._canon(tables.site(call)),
                    call.api,
                )
                for call in tables.calls
            ]
        return known

    def _refined(self, signature: Signature, api: str | None) -> Signature:
        op = refined_op(signature.op, api) if self._refines else signature.op
        return msgspec.structs.replace(signature, op=op)

    def _with_peer(self, signature: Signature, group: ProcessGroup) -> Signature:
        """Turn the place of a peer in its group into its rank."""
        place = signature.peer
        if place is None:
            return signature
        peer = group.ranks[place] if place < len(group.ranks) else place
        return self._canon(msgspec.structs.replace(signature, peer=peer))


def _has_ended(state: int, group: ProcessGroup) -> bool:
    # NCCL lets go of a call that timed out, and the rank is still in it.
    return state == COMPLETED or (state == RETIRED and group.backend == "gloo")
