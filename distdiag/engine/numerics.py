"""Puts side by side what ranks met of numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from distdiag.engine.aligner import Aligner, Gap, Job, NotObserved
from distdiag.engine.bounded import Recent
from distdiag.events.base import Event
from distdiag.events.lifecycle import Exited, Finished, ProbeDisabled, Raised, StepEnd
from distdiag.events.numerics import NearOverflow, NonFinite
from distdiag.events.ranks import RankSet
from distdiag.views.base import View
from distdiag.views.numerics import (
    LoneDecisionView,
    MaskedView,
    NearOverflowView,
    NonFiniteView,
    first_place,
)

_FORWARD: Final = ("parameter", "buffer", "input", "forward")
_MOST_KEPT: Final = 64
"""The first reports of a rank tell where it began; later ones are consequences as a rule."""
_MOST_MODULES: Final = 4096
_GIVEN_UP: Final = ("dropped", "skipped", "ended", "")


class NumericsAligner(Aligner):
    """Knows which rank met such numbers first once all ranks have passed that step."""

    needs = (NonFinite, NearOverflow, StepEnd, Raised, Finished, Exited, ProbeDisabled)
    builds = (NonFiniteView, MaskedView, LoneDecisionView, NearOverflowView)

    def __init__(self, job: Job) -> None:
        """Know of no number that is not finite."""
        super().__init__(job)
        self._events: dict[int, dict[tuple[int, int], NonFinite]] = {}
        self._near: Recent[tuple[str, str], dict[int, NearOverflow]] = Recent(_MOST_MODULES)
        self._raised: dict[int, Raised] = {}
        self._finished: set[int] = set()
        self._gone: set[int] = set()
        self._last_step: dict[int, int] = {}
        self._blind: set[int] = set()
        self._unjudged: int | None = None
        self._shown: set[bool] = set()

    def feed(self, event: Event) -> Iterable[View]:
        """Take in one event of one rank."""
        match event:
            case StepEnd():
                self._last_step[event.rank] = event.step
            case NonFinite():
                self._note(event)
            case NearOverflow():
                key = (event.model, event.module)
                self._near.of(key, dict).setdefault(event.rank, event)
            case Raised():
                self._raised.setdefault(event.rank, event)
                self._gone.add(event.rank)
            case Finished():
                self._finished |= {event.rank} if not event.exit_status else set()
                self._gone.add(event.rank)
            case Exited():
                self._gone.add(event.rank)
            case ProbeDisabled() if event.probe == "numerics":
                self._blind.add(event.rank)
        if self._unjudged is not None and self._have_passed(self._unjudged):
            self._unjudged = None
            return list(self._steps())
        return ()

    def _note(self, event: NonFinite) -> None:
        known = self._events.setdefault(event.rank, {})
        key = (event.step, event.window)
        if key in known or len(known) < _MOST_KEPT:
            known[key] = event
        elif event.outcome == "masked":
            del known[next(reversed(known))]
            known[key] = event
        if event.outcome not in ("", "masked"):
            self._unjudged = event.step if self._unjudged is None else self._unjudged

    def _have_passed(self, step: int) -> bool:
        """Say whether nobody can tell more of a step; a GPU tells of one in the next one."""
        return all(
            rank in self._gone or self._last_step.get(rank, -1) > step for rank in self.job.world
        )

    def end(self) -> Iterator[View]:
        """Judge all that is known."""
        yield from self._steps()
        yield from self._masked()
        yield from self._decisions()
        yield from (NearOverflowView(dict(sorted(each.items()))) for each in self._near.values())

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say on which ranks nobody has looked."""
        if self._blind:
            why = f"the numbers of {RankSet(self._blind).phrase()} are not observed wholly"
            return dict.fromkeys(self.builds, NotObserved(why))
        return {}

    # Where it began

    def _steps(self) -> Iterator[NonFiniteView]:
        """Yield the first step whose numbers did harm, and the first one that was left out."""
        for is_harmful in (True, False):
            wanted = self._is_harmful if is_harmful else self._is_left_out
            found = [e for e in self._all() if wanted(e)]
            if not found:
                if is_harmful in self._shown:  # a later report told what became of it
                    yield NonFiniteView(0, {}, is_harmful)
                continue
            self._shown.add(is_harmful)
            step = min(each.step for each in found)
            by_rank: dict[int, NonFinite] = {}
            for each in self._all():  # the masked numbers of this step, too, if it did harm
                is_here = each.step == step and (is_harmful or wanted(each))
                if is_here and (each.outcome != "masked" or each.rank not in by_rank):
                    by_rank.setdefault(each.rank, each)
            yield NonFiniteView(step, by_rank, is_harmful)

    def _all(self) -> list[NonFinite]:
        known = (each for rank in sorted(self._events) for each in self._events[rank].values())
        return [each for each in known if each.places]

    def _is_harmful(self, event: NonFinite) -> bool:
        if event.outcome == "stepped":
            is_scaled = {(each.stage, each.value) for each in event.places} == {("loss", "inf")}
            return not is_scaled or bool(event.infinite)
        if event.outcome not in ("ended", "") or event.rank in self._finished:
            return False
        is_raised = event.rank in self._raised
        return _is_made(event) and (event.is_loss_finite is False or is_raised)

    def _is_left_out(self, event: NonFinite) -> bool:
        """Say whether a step was left out; overflows that a gradient scaler provokes are meant."""
        return event.outcome in ("dropped", "skipped") and _is_made(event)

    # What hides it

    def _masked(self) -> Iterator[MaskedView]:
        by_rank: dict[int, NonFinite] = {}
        for event in self._all():
            known = by_rank.get(event.rank)
            is_told = known is not None and first_place(known).hidden_by
            if event.outcome == "masked" and not is_told:
                by_rank[event.rank] = event
        if by_rank:
            yield MaskedView(by_rank)

    # Who decided alone

    def _decisions(self) -> Iterator[LoneDecisionView]:
        world = set(self.job.world)
        left = {e.rank: e for e in reversed(self._all()) if e.outcome in _GIVEN_UP}
        raised = {rank: event for rank, event in left.items() if self._raised_at(rank, event.step)}
        raised = self._before_others(raised)
        if raised and world - raised.keys():
            errors = {rank: self._raised[rank] for rank in raised}
            yield LoneDecisionView("raised", raised, errors, RankSet(world - raised.keys()))
            return
        gone_on = {
            rank: event
            for rank, event in left.items()
            if event.outcome in ("dropped", "skipped") and self._is_out_of_step(rank, event)
        }
        if gone_on and world - left.keys():
            yield LoneDecisionView("on", gone_on, {}, RankSet(world - left.keys()))

    def _raised_at(self, rank: int, step: int) -> bool:
        return rank in self._raised and self._raised[rank].step == step

    def _before_others(self, found: Mapping[int, NonFinite]) -> dict[int, NonFinite]:
        """Return the ranks that raised before those which had no such numbers."""
        others = [each.time_ns for rank, each in self._raised.items() if rank not in found]
        return {
            rank: event
            for rank, event in found.items()
            if self._raised[rank].time_ns < min(others, default=1 << 63)
        }

    def _is_out_of_step(self, rank: int, event: NonFinite) -> bool:
        """Say whether a rank that left a step out has not come to the end together with others."""
        unfinished = set(self.job.world) - self._finished
        if not unfinished:
            steps = {self._last_step.get(each, -1) for each in self.job.world}
            return len(steps) > 1 and self._last_step.get(rank, -1) < max(steps)
        has_finished_alone = rank in self._finished
        return has_finished_alone or self._last_step.get(rank, -1) < event.step


def _is_made(event: NonFinite) -> bool:
    """Say whether a forward pass has made such a number, and not the scale of a loss."""
    return any(
        each.stage in _FORWARD or (each.stage == "loss" and each.value == "nan")
        for each in event.places
    )
