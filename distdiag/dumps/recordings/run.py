"""What the flight recorders of all ranks tell together, as events.

A recorder holds thousands of calls, and most are the same on every rank. These are compared by
digests; events are made only from shortly before the first point where the ranks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from distdiag.any_event import AnyEvent
from distdiag.dumps.recordings.groups import resolve_groups
from distdiag.dumps.recordings.names import refined_op
from distdiag.dumps.recordings.recording import (
    COMPLETED,
    NO_SEQ,
    PENDING,
    RETIRED,
    Recording,
    Tables,
)
from distdiag.dumps.recordings.spans import find_spans
from distdiag.event import (
    CallSite,
    Collective,
    CollectiveState,
    ProbeDisabled,
    ProcessGroup,
    Signature,
)
from distdiag.ranks import RankSet
from distdiag.wire import Canon

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
        self._is_whole = all(recording.first_id == 0 for recording in recordings.values())
        # Operations are told apart by the functions that made them on all ranks or on none.
        self._refines = all(recording.has_stacks for recording in recordings.values())
        self._canon = Canon()
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

    def events(self, rank: int) -> Iterator[AnyEvent]:
        """Yield what one rank did, in its order, as far as it is shown."""
        recording, groups = self._recordings[rank], self._groups[rank]
        spans = [self._spans.get(group) for group in groups]
        if any(span is not None and rank in span.stale_ranks for span in spans):
            yield ProbeDisabled(rank=rank, seq=-1, time_ns=0, probe="collectives", reason=_STALE)
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
