"""Why ranks made different calls, where it is known: a guard, an uneven loop, a skipped call."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import msgspec

from distdiag.checks.shared.activities import doing_of
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import blocking_call, frames_of
from distdiag.findings.finding import Evidence, Finding, Location
from distdiag.findings.source import (
    Guard,
    Loop,
    are_exclusive,
    guards,
    is_cleanup,
    is_readable,
    location_of,
    loop_lines,
    loops_around,
    rank_guards,
)
from distdiag.views.alignment import Alignment, Trigger
from distdiag.views.invariants import ROOTED, Aspect, clean_module, contradiction
from distdiag.views.rank_states import RankState, RankStatus

Place = tuple[tuple[Frame, ...], str | None]


@dataclass(frozen=True, slots=True)
class RankGone:
    """Missing ranks raised, died or left with a failing status, so they cannot come."""

    ranks: RankSet


@dataclass(frozen=True, slots=True)
class GuardedCall:
    """Some ranks make a call under a condition on the rank, and the others are not under it."""

    ranks: RankSet
    guard: Guard
    call: Collective
    point: Alignment[Collective]


@dataclass(frozen=True, slots=True)
class UnevenLoop:
    """`stayers` make one more pass of a loop than `leavers`, who left it or went on.

    `num_stayed` and `num_left` are how often either side made the call in the loop up to this
    point: what they did later, or in other groups, does not count. `loop` is None where the source
    cannot be read. `cleanup` is the line of a `finally` or `except` around it in which leavers went
    on: an exception may have ended it.
    """

    stayers: RankSet
    leavers: RankSet
    call: Collective
    num_stayed: int
    num_left: int
    point: Alignment[Collective]
    loop: Loop | None = None
    cleanup: Location | None = None


Explanation = RankGone | GuardedCall | UnevenLoop


def explain(alignment: Alignment[Collective]) -> Explanation | None:
    """Return the reason for a missing or contradictory collective, if it is known.

    Calls that merely come from different places need no reason: correct programs do that.
    """
    if alignment.kind != "collective" or not is_broken(alignment):
        return None
    gone = RankSet(r for r in alignment.missing_ranks if state_of(alignment, r).has_failed)
    if gone:
        return RankGone(gone)
    # Where the ranks parted earlier, the origin is there and this point is a consequence.
    points = [alignment.parted, alignment] if alignment.parted is not None else [alignment]
    for point in points:
        found = guarded_call(point, alignment) or uneven_iterations(point, alignment)
        if found is not None:
            return found
    return None


def unexplained(alignment: Alignment[Collective]) -> Aspect | None:
    """Return on what the records contradict one another, unless something explains it better."""
    aspect = contradiction(alignment)
    return aspect if aspect is not None and explain(alignment) is None else None


def is_broken(alignment: Alignment[Collective]) -> bool:
    """Say whether something is wrong here: a rank is missing or lags, or the records contradict."""
    if alignment.missing_ranks or contradiction(alignment) is not None:
        return True
    return bool(lagging_ranks(alignment))


def lagging_ranks(alignment: Alignment[Collective]) -> RankSet:
    """Return the ranks that are now where others were when the ranks parted, by an own call."""
    origin = alignment.parted
    if origin is None or origin.key == alignment.key or alignment.missing_ranks:
        return RankSet()
    here = {rank: place_of(call.site) for rank, call in alignment.by_rank.items()}
    there = {rank: place_of(call.site) for rank, call in origin.by_rank.items()}
    return RankSet(
        rank
        for rank in here
        for other in here
        if here[rank] == there[other]
        and here[rank] not in (here[other], there[rank])
        # Ranks that take turns at the same lines, such as senders of a broadcast, do not lag.
        and not num_passes(state_of(alignment, other), there[rank])
    )


def state_of(alignment: Alignment[Any], rank: int) -> RankState:
    """Return what is known of a rank."""
    return alignment.states.get(rank) or RankState(rank)


def place_of(site: CallSite) -> Place:
    """Return what makes two calls come from the same place in the program, torch's frames aside."""
    return (site.user_frames or site.frames, clean_module(site.module))


def num_passes(state: RankState, place: Place) -> int:
    """Return how often a rank made a call from a place."""
    return sum(count for site, count in state.site_counts.items() if place_of(site) == place)


def _passes_until(state: RankState, place: Place, seq: int | None) -> int:
    """Return how often a rank made a call from a place until it made the call `seq`, or ever."""
    later = () if seq is None else (call for call in state.recent if call.seq > seq)
    return num_passes(state, place) - sum(place_of(call.site) == place for call in later)


def guarded_call(point: Alignment[Collective], now: Alignment[Collective]) -> GuardedCall | None:
    """Find a condition on the rank that holds for some of the disagreeing ranks only."""
    frames = {rank: _user_frames(point, now, rank) for rank in point.expected_ranks}
    guards = {rank: _guards(frames[rank]) for rank in frames}
    shared = set.intersection(*(set(found) for found in guards.values()))
    extra = {rank: [g for g in found if g not in shared] for rank, found in guards.items()}
    guarded = RankSet(rank for rank in point.present_ranks if extra[rank])
    others = RankSet(rank for rank in point.expected_ranks if not extra[rank])
    if not guarded or len(guarded) + len(others) < len(point.expected_ranks):
        return None
    call = point.by_rank[min(guarded)]
    place = place_of(call.site)
    if not others or any(num_passes(state_of(now, rank), place) for rank in others):
        return None  # whoever passed this very call before is not kept from it by the guard
    guard = extra[min(guarded)][0]
    if not any(_has_gone_past(point, now, rank, guard) for rank in others):
        return None
    return GuardedCall(guarded, guard, call, point)


@dataclass(frozen=True, slots=True)
class Condition:
    """What decides whether a call is made: `callers` made it, `others` went past the condition."""

    guard: Guard
    callers: RankSet
    others: RankSet


def condition_passed(
    point: Alignment[Collective], now: Alignment[Collective], callers: RankSet, others: RankSet
) -> Condition | None:
    """Return the innermost condition above a call that others went past without making the call.

    They stand behind it in its function, or made another call of the group outside of it.
    """
    frames = {rank: _user_frames(point, now, rank) for rank in others}
    if not all(frames.values()):
        return None
    elsewhere = {guard for each in frames.values() for frame in each for guard in guards(frame)}
    call = point.by_rank[min(callers)]
    above = [guard for frame in reversed(call.site.user_frames) for guard in guards(frame)]
    passed = [
        guard
        for guard in above
        if guard not in elsewhere
        and not guard.text.startswith("while ")  # COL011 is about loops
        and all(_has_gone_past(point, now, rank, guard) for rank in others)
    ]
    return Condition(passed[-1], callers, others) if passed else None


def condition_between(alignment: Alignment[Collective]) -> Condition | None:
    """Return what decides which of two calls a rank makes, where they come from two places."""
    sides = groups_by_place(alignment)
    if len(sides) != 2:
        return None
    one, other = sides
    found = (
        condition_passed(alignment, alignment, callers, others)
        for callers, others in ((one, other), (other, one))
    )
    return next((each for each in found if each is not None), None)


def under(finding: Finding, condition: Condition) -> Finding:
    """Return a finding that names the condition under which a call stands, and what to do."""
    guard, others = condition.guard, condition.others.phrase()
    shown = Evidence(
        ranks=condition.callers,
        summary=f"`{guard.text}` decides whether the call is made",
        location=guard.location,
    )
    return msgspec.structs.replace(
        finding,
        location=guard.location,
        evidence=(*finding.evidence, shown),
        fix=f"Find out why `{guard.text}` (line {guard.location.line}) is decided differently on "
        f"{others}. Let one rank decide and broadcast the answer, or all_reduce it; or move the "
        "call out of the condition, so that all ranks make it.",
    )


def uneven_iterations(
    point: Alignment[Collective], now: Alignment[Collective]
) -> UnevenLoop | None:
    """Find a loop that some ranks run once more while the others left it or went on."""
    for stayers, leavers in _sides(point):
        call = point.by_rank[min(stayers)]
        finished = [r for r in leavers if state_of(now, r).status is RankStatus.FINISHED]
        leaver = state_of(now, min(finished or leavers))
        stayer = state_of(now, min(stayers))
        num_stayed = _passes_until(stayer, place_of(call.site), call.seq)
        left = point.by_rank.get(leaver.rank)
        num_left = _passes_until(leaver, place_of(call.site), left.seq if left else None)
        if num_stayed > num_left >= 1 and _has_left_loop(point, now, call, leaver.rank):
            stay, going = call.site.user_frames, _user_frames(point, now, leaver.rank)
            return UnevenLoop(
                stayers,
                leavers,
                call,
                num_stayed,
                num_left,
                point,
                _loop_left(stay, going),
                _cleanup(stay, going),
            )
    return None


def skipping_ranks(alignment: Alignment[Collective]) -> RankSet:
    """Return the ranks that went past a call which the others make now; empty if unknown."""
    groups = groups_by_place(alignment)
    if alignment.missing_ranks or len(groups) != 2:
        return RankSet()
    first, second = groups
    here, there = (place_of(alignment.by_rank[min(side)].site) for side in (first, second))
    seen = _last_passes(alignment, alignment, min(first), (here, there))
    if max(seen) < 0:
        split = _first_difference(here[0], there[0])
        if split is None or split[0].line == split[1].line or are_exclusive(*split):
            return RankSet()
        return second if split[0].line < split[1].line else first
    if min(seen) < 0:
        return RankSet()
    # The place that was passed longer ago is the one whose turn it is.
    return second if seen[0] < seen[1] else first


def is_by_role(alignment: Alignment[Collective]) -> bool:
    """Say whether the root calls from one branch of a condition and the others from the other."""
    call, groups = alignment.any_event, groups_by_place(alignment)
    root = call.signature.root
    if call.signature.op not in ROOTED or len(groups) != 2 or RankSet([root or 0]) not in groups:
        return False
    places = [place_of(alignment.by_rank[min(group)].site)[0] for group in groups]
    split = _first_difference(*places)
    return root is not None and split is not None and are_exclusive(*split)


def groups_by_place(alignment: Alignment[Collective]) -> tuple[RankSet, ...]:
    """Group the ranks that are here by the place of their call, the larger groups first."""
    ranks_at: dict[Place, list[int]] = {}
    for rank in alignment.present_ranks:
        ranks_at.setdefault(place_of(alignment.by_rank[rank].site), []).append(rank)
    groups = [RankSet(ranks) for ranks in ranks_at.values()]
    return tuple(sorted(groups, key=lambda group: (-len(group), min(group))))


def _sides(point: Alignment[Collective]) -> list[tuple[RankSet, RankSet]]:
    """Return the pairs of groups of which the first may have stayed and the second left."""
    groups = groups_by_place(point)
    if point.missing_ranks:
        return [(group, point.missing_ranks) for group in groups]
    return list(permutations(groups, 2))


def _user_frames(
    point: Alignment[Collective], now: Alignment[Collective], rank: int
) -> tuple[Frame, ...]:
    if rank in point.by_rank:
        return point.by_rank[rank].site.user_frames
    return tuple(frame for frame in frames_of(state_of(now, rank)) if frame.user)


def _guards(frames: tuple[Frame, ...]) -> list[Guard]:
    """Return the guards of a stack, those that the ranks meet first in front."""
    return [guard for frame in reversed(frames) for guard in rank_guards(frame)]


def _has_gone_past(
    point: Alignment[Collective], now: Alignment[Collective], rank: int, guard: Guard
) -> bool:
    """Say whether a rank is beyond the guard, and not merely late on the way to it."""
    if rank in point.by_rank or state_of(now, rank).status is RankStatus.FINISHED:
        return True
    if now.trigger is Trigger.CYCLE:
        return True
    return any(
        frame.file == guard.location.file
        and frame.function == guard.location.function
        and frame.line > guard.location.line
        for frame in _user_frames(point, now, rank)
    )


def _has_left_loop(
    point: Alignment[Collective], now: Alignment[Collective], call: Collective, leaver: int
) -> bool:
    """Say whether the call is inside a loop that the leaver is out of."""
    stay = call.site.user_frames
    state = state_of(now, leaver)
    if leaver in point.by_rank:
        going = point.by_rank[leaver].site
        places = (place_of(call.site), place_of(going))
        last_stay, last_go = _last_passes(point, now, leaver, places)
        if last_go > last_stay:
            return False  # it is the leaver that goes round: it skipped the call
        # Calls of an inner loop are more than those behind it.
        is_inner = num_passes(state, places[0]) >= num_passes(state, places[1])
        return _is_outside(going.user_frames, stay, default=is_inner)
    if state.status is RankStatus.FINISHED:
        return any(loop_lines(frame) for frame in stay) or not _readable(stay)
    frames = _user_frames(point, now, leaver)
    blocking = blocking_call(state)
    is_blocked = blocking is not None
    # A message that never comes holds a rank up on its way; a collective it may have gone on to.
    is_held = blocking is None or blocking.signature.peer is not None
    if not frames or (is_held and _is_on_its_way(frames, stay)):
        return False
    if now.trigger is Trigger.STALLED and doing_of(state) is not None:
        return False  # it is busy with something else, whichever pass of the loop it is in
    return _is_outside(frames, stay, default=is_blocked)


def _is_on_its_way(going: tuple[Frame, ...], stay: tuple[Frame, ...]) -> bool:
    """Say whether `going` is before `stay` in one pass of a loop that holds both: merely late."""
    split = _first_difference(stay, going)
    if split is None or split[1].line > split[0].line:
        return False
    return bool(loop_lines(split[0]) & loop_lines(split[1], with_head=True))


def _is_outside(going: tuple[Frame, ...], stay: tuple[Frame, ...], *, default: bool) -> bool:
    """Say whether `stay` is inside a loop that `going` is out of; `default` without the source."""
    split = _first_difference(stay, going)
    if split is None:
        return False
    if not _readable(stay):
        return default
    inner = stay[: stay.index(split[0])]
    own = loop_lines(split[0]) - loop_lines(split[1], with_head=True)
    return bool(own) or any(loop_lines(frame) for frame in inner)


def _cleanup(stay: tuple[Frame, ...], going: tuple[Frame, ...]) -> Location | None:
    split = _first_difference(stay, going)
    return location_of(split[1]) if split is not None and is_cleanup(*split) else None


def _loop_left(stay: tuple[Frame, ...], going: tuple[Frame, ...]) -> Loop | None:
    """Return the loop that `stay` is inside and `going` is out of.

    If there are more, the outermost that a condition ends; else the innermost of the outermost
    function, since a loop of a function that is called from there runs as often on all ranks.
    """
    split = _first_difference(stay, going)
    frames = stay[: stay.index(split[0]) + 1] if split is not None else stay
    outside = loop_lines(split[1], with_head=True) if split is not None else frozenset()
    by_frame = [found for frame in reversed(frames) if (found := [*loops_around(frame, outside)])]
    decided = (loop for found in by_frame for loop in reversed(found) if loop.is_decided)
    return next(decided, by_frame[0][0] if by_frame else None)


def _readable(frames: tuple[Frame, ...]) -> bool:
    return all(is_readable(frame) for frame in frames)


def _first_difference(
    first: tuple[Frame, ...], second: tuple[Frame, ...]
) -> tuple[Frame, Frame] | None:
    """Return the outermost frames in which two stacks differ."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return next(((a, b) for a, b in pairs if a != b), None)


def _last_passes(
    point: Alignment[Collective],
    now: Alignment[Collective],
    rank: int,
    places: tuple[Place, Place],
) -> tuple[int, int]:
    """Return when a rank last made a call from either place before this point; -1 is unknown."""
    before = point.by_rank[rank].seq
    calls = [call for call in state_of(now, rank).recent if call.seq < before]
    first, second = (
        max((call.seq for call in calls if place_of(call.site) == place), default=-1)
        for place in places
    )
    return (first, second)
