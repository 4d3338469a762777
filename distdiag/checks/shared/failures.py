"""Which rank ended first and by itself, and which ends are only consequences of another."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import blocking_call, user_location
from distdiag.findings.finding import Location
from distdiag.findings.known_faults import KnownFault, fault_of_exception
from distdiag.record.exception_text import first_of_chain
from distdiag.views.alignment import Alignment
from distdiag.views.invariants import contradiction
from distdiag.views.rank_states import END_SIGNALS, RankState, RankStatus, States, was_asked_to_end

# What a rank's backend says when a peer of its has gone, or did not come.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe"
    r"|network error or a remote process|NetworkError|remote peer|heartbeat"
    r"|tim(ed|e) ?out|remote process exited|nccl communicator was aborted|watchdog"
    r"|socket|failed to (recv|send)|enforce fail at \S{0,200}gloo|CollectiveMismatchError",
    re.IGNORECASE,
)
# Words of NCCL that explain a class of errors and say nothing of this one.
_EXPLANATION = re.compile(r"\(e\.g\. socket, malloc\)")
# What watches collectives has reported that one of them did not end: sources of `Observed`.
MISMATCH = "Detected mismatch between collectives on ranks"
_WATCHES = frozenset({"nccl-log", "gloo-log", "hccl-log"})
_TIMED_OUT = frozenset({"timeout", "status", "dump-signal", "watchdog-stuck"})
# What the job's store says on a rank that looks for it at the wrong place.
_CANNOT_REACH = re.compile(
    r"while trying to connect to|failed to connect to|client socket has|failed to resolve"
    r"|hostname of the client socket|name or service not known|name resolution",
    re.IGNORECASE,
)
_INTERRUPTIONS = frozenset({"KeyboardInterrupt", "SignalException", "SystemExit"})
_SETTING_UP = frozenset({"init_process_group", "rendezvous", "_create_c10d_store"})

TOGETHER_NS: Final = 1_000_000_000
"""Ranks that one signal to the whole job ends are gone within this time.

It is chosen, not measured: who sends the signal does so in one loop, but a process is gone only
when the kernel has taken its memory apart. Launchers that end the others of a rank that was killed
do so by SIGTERM first, so that a longer time would join only what somebody else killed alike.
"""
GRACE_NS: Final = 30_000_000_000
"""torchelastic and Slurm (KillWait) kill a rank that has not obeyed by then; what fails later is
another matter."""
UNKNOWN_TOGETHER_NS: Final = 100_000_000
"""The same where the signal is not known: torchelastic looks at its ranks this often."""
SETTLED_S: Final = TOGETHER_NS / 1e9
"""So long after a rank has left or was killed it is clear which others do so as well."""

GroupId = tuple[str, int, int]
EndKey = tuple[str, int | None, Location | None]


@dataclass(frozen=True, slots=True)
class FirstEnd:
    """The ranks that ended first, all in one way; what others met later is a consequence.

    `is_outside`: somebody ended the ranks of the job; none of them did so by itself. `tied` are
    other ends of which nothing says whether they came earlier or later.
    """

    ranks: RankSet
    is_outside: bool = False
    tied: tuple[RankSet, ...] = ()


def first_end(states: States) -> FirstEnd | None:
    """Return how the end of the job began, if one of its ranks has ended badly.

    A rank that raised, left with a failing status or crashed did so by itself, and comes before
    those that a signal asked to end, whenever that was seen: their launcher did it.
    """
    failed = sorted((s for s in states.values() if s.has_failed), key=_by_time)
    own = [s for s in failed if not (_was_asked_to_end(s) or is_consequence(s, states))]
    # A launcher that has lost patience kills, too: only the first such death is a cause.
    nodes = [s for s in own if is_failed_node(s)]
    # Processes that died somehow did so on a node that failed, or since it had failed.
    own = [
        s
        for s in own
        if s in nodes
        or not _may_be_killed_by_launcher(s)
        or (not nodes and _may_be_first(s, failed[0]))
    ]
    if own:
        alike = (s for s in failed if s in own or not is_consequence(s, states))
        ranks = RankSet(s.rank for s in alike if s in own[:1] or _ended_alike(own[0], s))
        if origin := named_origin(own[0]) & states.keys():
            return FirstEnd(RankSet(origin))
        is_outside = _were_all_killed(own[0], ranks, states)
        return FirstEnd(ranks, is_outside, _tied(own, ranks))
    if any(state.lost is not None for state in states.values()):
        return None  # what others met since their peers' node was lost came of that
    if failed and _was_asked_to_end(failed[0]):
        # Who did not obey was killed.
        ended = [s for s in failed if _was_asked_to_end(s) or _may_be_killed_by_launcher(s)]
        is_all = len(ended) == len(failed) and not _running(states)
        return FirstEnd(RankSet(s.rank for s in ended), is_outside=is_all or len(ended) > 1)
    # All that is known then is who waited in vain for a peer to come, or that one went somehow.
    waited = [s for s in failed if s.raised is not None and was_setting_up(s)]
    unknown = [s for s in failed if s.status is RankStatus.DIED and s.exit_status is None]
    left = [*waited, *unknown]
    return FirstEnd(RankSet([left[0].rank])) if left else None


def last_word(states: States) -> FirstEnd | None:
    """Return who was the first to fail where all ranks did so for want of a peer.

    It is no cause, but the last that is known of how the job ended.
    """
    failed = sorted((s for s in states.values() if s.has_failed), key=_by_time)
    if not failed or _was_asked_to_end(failed[0]):
        return None
    raised = [s for s in failed if s.raised is not None] or failed
    return FirstEnd(
        RankSet(s.rank for s in failed if s in raised[:1] or _ended_alike(raised[0], s))
    )


# The exception of ``torch.distributed.checkpoint``, which all ranks raise, names those that failed.
_FAILED_RANKS: Final = re.compile(r"CheckpointException ranks: ?dict_keys\(\[([\d, ]{1,10000})\]\)")


def named_origin(state: RankState) -> RankSet:
    """Return the ranks in which an exception arose that was passed on to others, as it says."""
    match = _FAILED_RANKS.search(state.raised.message) if state.raised is not None else None
    ranks = match[1].split(",") if match is not None else ()
    return RankSet(int(rank) for rank in ranks if rank.strip())


def _tied(own: list[RankState], ranks: RankSet) -> tuple[RankSet, ...]:
    """Return the ranks that raised something else at the very time of the first.

    Logs that do not tell the order of the ends have one time for all.
    """
    first = own[0]
    if first.raised is None or not first.is_reported_only:
        return ()
    alike: dict[EndKey, list[int]] = {}
    for state in own:
        if state.raised is not None and state.left_ns == first.left_ns and state.rank not in ranks:
            alike.setdefault(_end_key(state), []).append(state.rank)
    return tuple(RankSet(each) for each in alike.values())


def is_settled(end: FirstEnd, states: States) -> bool:
    """Say whether all ranks that end in this way have been seen to do so."""
    first = states[min(end.ranks)]
    since_s = min(states[rank].idle_s for rank in end.ranks)
    if _was_asked_to_end(first):
        return since_s >= GRACE_NS / 1e9 or not _running(states)
    if _may_be_killed_by_launcher(first):
        return since_s >= SETTLED_S or not _running(states)
    # A rank that waits in a call will neither leave nor crash by itself.
    return since_s >= SETTLED_S or all(blocking_call(state) for state in _running(states))


def is_consequence(state: RankState, states: States) -> bool:
    """Say whether a rank failed because a peer was gone, or its call contradicted a peer's."""
    if state.raised is None:
        return aborted_in_collective(state, states)
    if MISMATCH in state.raised.message:
        return True  # it tells both calls, which the checks of collectives judge
    fault = known_fault_of(state)
    if fault is not None and _only_follows(fault, states):
        return True
    if not _inside_torch(state):
        return False
    text = f"{state.raised.type}: {state.raised.message}"
    if was_setting_up(state) and _CANNOT_REACH.search(text):
        return False
    is_own = fault is not None and fault.role == "cause"
    is_gone = says_peer_is_gone(state.raised.type, state.raised.message) and not is_own
    return is_gone or contradicting_rank(state, states) is not None


def _only_follows(fault: KnownFault, states: States) -> bool:
    """Say whether a fault follows from another: what says little does so after a timeout."""
    return fault.role == "consequence" or (
        fault.role == "general" and any(_has_timed_out(state) for state in states.values())
    )


def _has_timed_out(state: RankState) -> bool:
    seen = (state.observed[source] for source in _WATCHES & state.observed.keys())
    return any(each.values.get("kind") in _TIMED_OUT for each in seen)


def says_peer_is_gone(kind: str, message: str) -> bool:
    """Say whether an exception tells that a peer has gone, or did not come."""
    return _PEER_IS_GONE.search(f"{kind}: {_EXPLANATION.sub('', message)}") is not None


def says_interrupted(kind: str) -> bool:
    """Say whether an exception of this type is what becomes of a signal."""
    return kind.rsplit(".", 1)[-1] in _INTERRUPTIONS


# Whom a rank waited for, where its message says it. The number is that in the group.
_WAITED_FOR: Final = re.compile(
    r"ncclUniqueId from \[(\d{1,6})\]|waiting for send/recv from rank (\d{1,6})"
)


def waited_for(message: str) -> int | None:
    """Return the rank for which another waited in vain, as its message says."""
    match = _WAITED_FOR.search(message)
    return int(match[1] or match[2]) if match is not None else None


def aborted_in_collective(state: RankState, states: States) -> bool:
    """Say whether a process was aborted because a collective of it did not end in time.

    One of which the rank is not known may be any of those whose collectives timed out.
    """
    if state.status is not RankStatus.DIED or state.exit_status != -signal.SIGABRT:
        return False
    return any(_has_timed_out(each) for each in (states.values() if state.label else [state]))


def known_fault_of(state: RankState) -> KnownFault | None:
    """Return the well-known fault that a rank raised, or that led to what it raised."""
    if state.raised is None:
        return None
    versions = {"torch": state.torch}
    fault = fault_of_exception(state.raised.type, state.raised.message, versions)
    if fault is not None:
        return fault
    kind, _, message = first_of_chain(state.raised.traceback).partition(": ")
    earlier = fault_of_exception(kind, message, versions) if kind else None
    return earlier if earlier is not None and earlier.role == "cause" else None


def is_interruption(state: RankState) -> bool:
    """Say whether the exception only passes on that somebody ended the run."""
    return state.raised is not None and says_interrupted(state.raised.type)


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


def _by_time(state: RankState) -> tuple[int, int]:
    return (state.left_ns, state.rank)


def _was_asked_to_end(state: RankState) -> bool:
    """Say whether a rank ended because a signal asked it to, in whatever way it obeyed."""
    got = state.signalled
    if got is not None and got.signal in END_SIGNALS and state.left_ns - got.time_ns <= GRACE_NS:
        return True
    if state.status is RankStatus.RAISED:
        return is_interruption(state)
    return was_asked_to_end(state.exit_status)


def _may_be_killed_by_launcher(state: RankState) -> bool:
    return state.status is RankStatus.DIED and state.exit_status in (None, -signal.SIGKILL)


def is_failed_node(state: RankState) -> bool:
    """Say whether it is no process but a node, of which a scheduler has said that it failed."""
    gone = state.exited
    return gone is not None and gone.cause == "node-failed" and gone.status is None


def _may_be_first(killed: RankState, first: RankState) -> bool:
    """Say whether a killed rank may be the cause of the end that comes first in the records.

    A busy monitor finds the killed rank and those that the launcher has ended because of it gone at
    once, and knows of each only when it was last alive: the killed one may have ended before the
    first was found gone. Who did not obey was alive then, for launchers wait before they kill.
    """
    if killed.left_ns == first.left_ns:
        return True
    is_launchers = (killed.exit_status, first.exit_status) == (-signal.SIGKILL, -signal.SIGTERM)
    gone_ns = first.exited.gone_ns if first.exited is not None else 0
    return is_launchers and killed.left_ns <= gone_ns


def _ended_alike(first: RankState, other: RankState) -> bool:
    """Say whether two ranks ended in the same way: raised the same, left alike, died together."""
    if _end_key(first) != _end_key(other):
        return False
    together_ns = TOGETHER_NS if other.exit_status else UNKNOWN_TOGETHER_NS
    return first.status is not RankStatus.DIED or other.left_ns - first.left_ns <= together_ns


def _end_key(state: RankState) -> EndKey:
    if state.raised is not None:
        frames = state.raised.frames
        innermost = Location(frames[0].file, frames[0].line, frames[0].function) if frames else None
        return (state.raised.type, None, user_location(frames) or innermost)
    frames = state.finished.frames if state.finished is not None else ()
    return (state.status, state.exit_status, user_location(frames))


def _were_all_killed(first: RankState, ranks: RankSet, states: States) -> bool:
    """Say whether all ranks that were there were killed at once, and not by a fault of theirs."""
    if not _may_be_killed_by_launcher(first) or len(states) < 2:
        return False
    if first.is_reported_only and first.exit_status is None:
        return False  # of others, and of how these ended, nothing is known
    is_short = any(s.oom_kills or _was_short_of_memory(s) for s in states.values())
    return ranks == _still_there(states.values()) and not is_short


def _was_short_of_memory(state: RankState) -> bool:
    return state.exited is not None and state.exited.cause == "out-of-memory"


def _running(states: States) -> list[RankState]:
    """Return the ranks of which more may be heard."""
    return [s for s in states.values() if s.status is RankStatus.RUNNING and not s.is_over]


def _still_there(states: Iterable[RankState]) -> RankSet:
    """Return the ranks that had not come to the end of their script."""
    return RankSet(s.rank for s in states if s.has_failed or s.status is RankStatus.RUNNING)


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


def was_setting_up(state: RankState) -> bool:
    """Say whether a rank raised before it had become a member of the job."""
    frames = state.raised.frames if state.raised is not None else ()
    return any(
        not frame.user and frame.function in _SETTING_UP and "torch_xla" not in frame.file
        for frame in frames
    )
