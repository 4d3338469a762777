"""Which rank failed first, and which failures are only consequences of another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distdiag.alignment import Alignment, Fate, RankState
from distdiag.event import Collective
from distdiag.finding import Location
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.invariants import contradiction

# What a rank's backend says when a peer of its has gone, or did not come.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe"
    r"|tim(ed|e) ?out|remote process exited|nccl communicator was aborted|watchdog"
    r"|socket|failed to (recv|send)|enforce fail|CollectiveMismatchError",
    re.IGNORECASE,
)
_INTERRUPTIONS = frozenset({"KeyboardInterrupt", "SignalException", "SystemExit"})

States = Mapping[int, RankState]
GroupId = tuple[str, int, int]


def first_raised(states: States) -> RankSet:
    """Return the ranks that raised the first exception that is no consequence of another one.

    Ranks that raised the same at the same line are the first together, whenever they did.
    """
    raised = [s for s in states.values() if s.raised is not None and not is_consequence(s, states)]
    if not raised:
        return RankSet()
    first = min(raised, key=lambda state: (state.left_ns, state.rank))
    return RankSet(s.rank for s in raised if exception_key(s) == exception_key(first))


def first_died(states: States) -> RankSet:
    """Return the ranks that died before any other left badly; their launcher killed the rest."""
    died = [state for state in states.values() if state.fate is Fate.DIED]
    first_ns = min((state.left_ns for state in died), default=0)
    return RankSet(state.rank for state in died if state.left_ns == first_ns)


def is_consequence(state: RankState, states: States) -> bool:
    """Say whether a rank failed because a peer was gone, or its call contradicted a peer's."""
    if state.raised is None or not _inside_torch(state):
        return False
    if _PEER_IS_GONE.search(f"{state.raised.type}: {state.raised.message}"):
        return True
    return contradicting_rank(state, states) is not None


def is_interruption(state: RankState) -> bool:
    """Say whether the exception only passes on that somebody ended the run."""
    return state.raised is not None and state.raised.type.rsplit(".", 1)[-1] in _INTERRUPTIONS


def exception_key(state: RankState) -> tuple[str, Location | None]:
    """Return what makes the exceptions of two ranks the same one."""
    if state.raised is None:
        return ("", None)
    return (state.raised.type, user_location(state.raised.frames))


def contradicting_rank(state: RankState, states: States) -> int | None:
    """Return a rank whose record of one of this rank's last collectives contradicts its own."""
    mine = {_key(call): call for call in state.recent if call.collective_seq_id >= 0}
    for rank, other in states.items():
        pairs = ((mine[_key(c)], c) for c in other.recent if _key(c) in mine)
        if rank != state.rank and any(_contradict(*pair) for pair in pairs):
            return rank
    return None


def has_contradiction(states: States) -> bool:
    """Say whether the last collectives of any two ranks contradict one another."""
    first: dict[GroupId, Collective] = {}
    calls = (call for state in states.values() for call in state.recent)
    return any(
        _contradict(first.setdefault(_key(call), call), call)
        for call in calls
        if call.collective_seq_id >= 0
    )


def _contradict(mine: Collective, theirs: Collective) -> bool:
    if mine.signature == theirs.signature and mine.site.module == theirs.site.module:
        return False
    pair = Alignment(
        kind="collective",
        key=(mine.group.label, mine.collective_seq_id),
        by_rank={mine.rank: mine, theirs.rank: theirs},
        expected_ranks=RankSet((mine.rank, theirs.rank)),
    )
    return contradiction(pair) is not None


def _key(call: Collective) -> GroupId:
    return (call.group.name, call.group.generation, call.collective_seq_id)


def _inside_torch(state: RankState) -> bool:
    frames = state.raised.frames if state.raised is not None else ()
    # The strict mode raises in the tool's own frames, below torch's.
    return not frames or not frames[0].user
