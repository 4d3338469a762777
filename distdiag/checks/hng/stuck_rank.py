"""What the checks share that say where a rank is stuck while the job stands still."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final

from distdiag.checks.base import Check
from distdiag.checks.shared.activities import Activity, common_activity, doing_of, is_busy
from distdiag.checks.shared.culprits import all_work, blame_missing, is_reliable, missing_evidence
from distdiag.checks.shared.stuck import activity_of_missing, odd_ranks
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed
from distdiag.findings.descriptions import (
    at,
    call_location,
    call_phrase,
    frames_of,
    help_phrase,
    other_threads,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location
from distdiag.views.alignment import OpenCollective, OpenGroup
from distdiag.views.rank_states import JobView, RankState

# What was seen of ranks from outside, as evidence: the kernel, the GPU, logs.

MOST_RANKS = 8
"""Of so many ranks what was seen is shown; they are usually stuck in the same way."""


def outside_evidence(states: Mapping[int, RankState], ranks: Iterable[int]) -> tuple[Evidence, ...]:
    """Return what each source saw of these ranks, and which source could not see them and why."""
    seen = [event for rank in sorted(ranks) for event in states[rank].observed.values()]
    told = [event for event in seen if not event.error]
    shown = {event.rank for event in told}
    few = sorted(shown)[:MOST_RANKS]
    return tuple(_evidence(event) for event in told if event.rank in few) + _blind(seen)


def _evidence(event: Observed) -> Evidence:
    return Evidence(
        ranks=RankSet([event.rank]),
        summary=f"{event.source}: {event.summary}",
        values=event.values,
    )


def _blind(seen: Iterable[Observed]) -> tuple[Evidence, ...]:
    ranks_by_reason: dict[tuple[str, str], list[int]] = {}
    for event in seen:
        if event.error:
            ranks_by_reason.setdefault((event.source, event.error), []).append(event.rank)
    return tuple(
        Evidence(ranks=RankSet(ranks), summary=f"{source} saw nothing: {reason}")
        for (source, reason), ranks in ranks_by_reason.items()
    )


# ---

MOST_THREADS: Final = 4
_PLURALS: Final = {"is": "are", "was": "were", "has": "have", "waits": "wait", "holds": "hold"}


class StuckRank(Check[OpenCollective | OpenGroup | JobView]):
    """Speaks of one kind of activity; `instead` says what the rank does, after its name."""

    activities: ClassVar[frozenset[Activity]]
    instead: ClassVar[str]

    def check(self, view: OpenCollective | OpenGroup | JobView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case OpenCollective() | OpenGroup():
                yield from self._check_missing(view)
            case JobView():
                yield from self._check_ranks(view)

    def _check_missing(self, alignment: OpenCollective | OpenGroup) -> Iterator[Finding]:
        """Judge a point that the others have reached, and wait at for these ranks."""
        if activity_of_missing(alignment) not in self.activities:
            return
        culprits = blame_missing(alignment).culprits
        event = alignment.any_event
        location = user_location(event.site.frames)
        is_note = all_work(alignment, culprits) or not is_reliable(alignment)
        waiting = Evidence(
            ranks=alignment.present_ranks, summary=f"waits in {_name(event)}", location=location
        )
        yield self._found(
            culprits,
            alignment.states,
            f"; {alignment.present_ranks.phrase()} {_agree('waits', alignment.present_ranks)} in "
            f"{_name(event)}{at(location)}",
            (waiting, *missing_evidence(alignment)),
            is_note=is_note,
        )

    def _check_ranks(self, view: JobView) -> Iterator[Finding]:
        """Judge a job that stands still though nobody waits for another rank in a call."""
        states = view.states
        ranks = odd_ranks(states)
        if not ranks or common_activity(states[rank] for rank in ranks) not in self.activities:
            return
        yield self._found(ranks, states, "", _everyone(states), is_note=_all_work(states, ranks))

    def _found(
        self,
        culprits: RankSet,
        states: Mapping[int, RankState],
        others: str,
        evidence: tuple[Evidence, ...],
        *,
        is_note: bool,
    ) -> Finding:
        state = states[min(culprits)]
        location = _place(state)
        doing = doing_of(state)
        signs = [doing.sign] if doing is not None and doing.sign else []
        signs += [help_phrase(state.help)] if state.help is not None else []
        sign = f" ({'; '.join(signs)})" if signs else ""
        return self.finding(
            f"{culprits.phrase()} {_agree(self.instead, culprits)}{at(location)} and "
            f"{_agree('has', culprits)} not moved for {state.idle_s:.0f} s{sign}{others}",
            ranks=culprits,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.LIKELY,
            confidence=0.4 if is_note else 0.85,
            evidence=evidence
            + tuple(line for rank in culprits for line in _history(states[rank]))
            + outside_evidence(states, culprits),
        )


def _name(event: Collective | GroupCreated) -> str:
    return call_phrase(event) if isinstance(event, Collective) else event.api


def _place(state: RankState) -> Location | None:
    """Return the user's line where a rank is: of its main thread, else of any, else of its call."""
    here = user_location(frames_of(state))
    threads = [place for _, place in other_threads(state)]
    call = state.last_call
    last = call_location(call) if call is not None else None
    return here or next(iter(threads), None) or last


def _history(state: RankState) -> Iterator[Evidence]:
    """Return where the rank's other threads are, and the last call that it made."""
    ranks = RankSet([state.rank])
    for name, place in other_threads(state)[:MOST_THREADS]:
        yield Evidence(ranks=ranks, summary=f"its thread {name} is at {place}", location=place)
    if state.last_call is not None:
        call = state.last_call
        yield Evidence(
            ranks=ranks, summary=f"its last call: {call_phrase(call)}", location=call_location(call)
        )


def _agree(words: str, ranks: RankSet) -> str:
    """Put the verb that the words begin with into the plural for several ranks."""
    verb, _, rest = words.partition(" ")
    several = _PLURALS.get(verb, verb) if len(ranks) > 1 else verb
    return f"{several} {rest}" if rest else several


def _all_work(states: Mapping[int, RankState], ranks: RankSet) -> bool:
    return all(is_busy(states[rank]) for rank in ranks)


def _everyone(states: Mapping[int, RankState]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            ranks=RankSet([state.rank]),
            summary=whereabouts(state),
            location=user_location(frames_of(state)),
        )
        for state in states.values()
    )
