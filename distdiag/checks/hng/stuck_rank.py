"""What the checks share that report where a rank is stuck while the job stands still."""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final

from distdiag.checks.base import Check
from distdiag.checks.shared.activities import Activity, common_activity, doing_of, will_come
from distdiag.checks.shared.culprits import all_work, blame_missing, is_reliable, missing_evidence
from distdiag.checks.shared.holders import holder_of
from distdiag.checks.shared.stuck import activity_of_missing, odd_ranks
from distdiag.events.collectives import Collective, GroupCreated
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed
from distdiag.findings.descriptions import (
    agree,
    at,
    call_location,
    call_phrase,
    frames_of,
    help_phrase,
    idle_phrase,
    other_threads,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location
from distdiag.findings.known_faults import KnownFault, fault_of_stack
from distdiag.views.alignment import OpenCollective, OpenGroup
from distdiag.views.rank_states import JobView, RankState

MOST_RANKS: Final = 8
"""What the kernel, the GPU and logs say is shown of so many ranks; more are stuck alike."""
MOST_THREADS: Final = 4


def outside_evidence(states: Mapping[int, RankState], ranks: Iterable[int]) -> tuple[Evidence, ...]:
    """Return what each source saw of these ranks, and which source could not see them and why."""
    seen = [event for rank in sorted(ranks) for event in states[rank].observed.values()]
    answers = [event for event in seen if not event.error]
    few = sorted({event.rank for event in answers})[:MOST_RANKS]
    shown = (
        Evidence(
            ranks=RankSet([event.rank]),
            summary=f"{event.source}: {event.summary}",
            values=event.values,
        )
        for event in answers
        if event.rank in few
    )
    return (*shown, *_failed_sources(seen))


def _failed_sources(seen: Iterable[Observed]) -> Iterator[Evidence]:
    ranks_by_reason: dict[tuple[str, str], list[int]] = {}
    for event in seen:
        if event.error:
            ranks_by_reason.setdefault((event.source, event.error), []).append(event.rank)
    for (source, reason), ranks in ranks_by_reason.items():
        yield Evidence(ranks=RankSet(ranks), summary=f"{source} saw nothing: {reason}")


def where_all_are(states: Mapping[int, RankState]) -> tuple[Evidence, ...]:
    """Return what each rank does, and at which line."""
    return tuple(
        Evidence(
            ranks=RankSet([state.rank]),
            summary=whereabouts(state),
            location=user_location(frames_of(state)),
        )
        for state in states.values()
    )


class StuckRank(Check[OpenCollective | OpenGroup | JobView]):
    """A check of one kind of activity; `instead` says what the rank does, after its name."""

    activities: ClassVar[frozenset[Activity]]
    instead: ClassVar[str]

    def check(self, view: OpenCollective | OpenGroup | JobView) -> Iterator[Finding]:
        """Judge a call in which ranks wait for others, or a job that stands still as a whole."""
        if isinstance(view, JobView):
            yield from self._standing_job(view)
        else:
            yield from self._awaited_ranks(view)

    def _awaited_ranks(self, alignment: OpenCollective | OpenGroup) -> Iterator[Finding]:
        if activity_of_missing(alignment) not in self.activities:
            return
        culprits = blame_missing(alignment).culprits
        event = alignment.any_event
        location = user_location(event.site.frames)
        is_note = all_work(alignment, culprits) or not is_reliable(alignment)
        waiting = Evidence(
            ranks=alignment.present_ranks, summary=f"waits in {_name(event)}", location=location
        )
        yield self._stuck(
            culprits,
            alignment.states,
            f"; {alignment.present_ranks.phrase()} {agree('waits', alignment.present_ranks)} in "
            f"{_name(event)}{at(location)}",
            (waiting, *missing_evidence(alignment)),
            is_note=is_note,
        )

    def _standing_job(self, view: JobView) -> Iterator[Finding]:
        states = view.states
        ranks = odd_ranks(states)
        if not ranks or common_activity(states[rank] for rank in ranks) not in self.activities:
            return
        is_note = all(will_come(states[rank], states) for rank in ranks)
        yield self._stuck(ranks, states, "", where_all_are(states), is_note=is_note)

    def _stuck(
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
        holder = holder_of(state, states)
        who = f"; {holder.text}" if holder is not None else ""
        fault = fault_on_stacks(state)
        return self.finding(
            f"{culprits.phrase()} {agree(self.instead, culprits)}{at(location)} and "
            f"{agree('has', culprits)} not moved{idle_phrase(state)}{sign}{who}{others}",
            ranks=culprits,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.LIKELY,
            confidence=0.4 if is_note else 0.85,
            evidence=(holder.evidence if holder is not None else ())
            + evidence
            + tuple(line for rank in culprits for line in _history(states[rank]))
            + outside_evidence(states, culprits),
            why=fault.cause if fault is not None else self.why,
            fix=holder.fix if holder is not None else fault.fix if fault is not None else self.fix,
        )


def fault_on_stacks(state: RankState) -> KnownFault | None:
    """Return the well-known fault that a rank's stacks show, if they show one."""
    threads = state.stacks.threads if state.stacks is not None else ()
    rows = (fault_of_stack(thread.frames, {"torch": state.torch}) for thread in threads)
    return next((row for row in rows if row is not None), None)


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
