"""The checks of a run: each sees the views that it needs, and its findings are collected."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from distdiag.checks.base import Check
from distdiag.checks.dia.crashed_check import CrashedCheck
from distdiag.events.base import Event
from distdiag.events.data import ModelFed
from distdiag.events.files import FileAccess
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import SteppedAlone
from distdiag.events.losses import LossWeights
from distdiag.events.models import ModelPlan, ModelState, OptimizerState, PlanPatterns
from distdiag.events.routing import Routing, TokensExchanged
from distdiag.events.sequences import SequenceUse
from distdiag.findings.finding import Finding, Severity
from distdiag.findings.store import Conclusions
from distdiag.views.alignment import Alignment
from distdiag.views.data import FeedView
from distdiag.views.files import MissingFile, Race
from distdiag.views.gradients import GradientView, SumsView
from distdiag.views.losses import LossView
from distdiag.views.models import (
    ContentView,
    ModelView,
    PlanView,
    ProgramPlanView,
    ReplicaView,
    RuleView,
    ScalingView,
    UntrainedView,
    View,
)
from distdiag.views.rank_states import RankState
from distdiag.views.routing import RoundTrip, RoutingView, UnfitExchange
from distdiag.views.sequences import SequenceView

States = Mapping[int, RankState]


class Judges:
    """The checks that judge a run, and what they have concluded.

    A check that raises is disabled; `disabled` says why, by code.
    """

    def __init__(self, checks: Iterable[Check]) -> None:
        """Let these checks judge."""
        self.disabled: dict[str, str] = {}
        self._checks = list(checks)
        self.conclusions = Conclusions({check.code: check.covers for check in self._checks})
        self._listeners: dict[type[Event], list[Check]] = {}

    @property
    def with_subject(self) -> tuple[Check, ...]:
        """The checks that say what they have looked at nothing without."""
        return tuple(check for check in self._checks if check.absent)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the checks that judge."""
        return tuple(check.code for check in self._checks)

    @property
    def comparing(self) -> tuple[str, ...]:
        """The codes of the checks that find nothing where only one rank is observed."""
        return tuple(check.code for check in self._checks if check.compares_ranks())

    def needing(self, event_type: type[Event]) -> tuple[Check, ...]:
        """Return the checks that judge events of this type."""
        return tuple(check for check in self._checks if issubclass(event_type, check.needs))

    def is_concerned(self, check: Check, event: Event) -> bool:
        """Say whether a run with this event has something that a check looks at."""
        try:
            return check.concerns(event)
        except Exception as error:  # noqa: BLE001 - as in `_ask`
            self._disable(check, error)
            return True

    def judge(self, alignment: Alignment[Any]) -> bool:
        """Show a complete alignment; return whether a finding of warning or above came of it."""
        checks = self.needing(type(alignment.any_event))
        return any([self._take(check, check.check_alignment, alignment) for check in checks])

    def judge_missing(self, alignment: Alignment[Any]) -> bool:
        """Show an incomplete alignment; return whether a finding of warning or above came of it."""
        checks = self.needing(type(alignment.any_event))
        return any([self._take(check, check.check_missing, alignment) for check in checks])

    def judge_race(self, subject: object, race: Race) -> None:
        """Show a race; what is found replaces what was found when it was smaller."""
        for check in self.needing(FileAccess):
            found = self._ask(check, check.check_race, race)
            self.conclusions.revise((check.code, subject), found)

    def judge_model(self, view: View) -> None:
        """Show plans, contents or gradients of a model."""
        kinds: dict[type, type[Event]] = {ModelView: ModelPlan, UntrainedView: OptimizerState}
        for check in self.needing(kinds.get(type(view), ModelState)):
            match view:
                case ModelView():
                    self._take(check, check.check_model, view)
                case ReplicaView():
                    self._take(check, check.check_replicas, view)
                case ContentView():
                    self._take(check, check.check_contents, view)
                case ScalingView():
                    self._take(check, check.check_scaling, view)
                case UntrainedView():
                    self._take(check, check.check_untrained, view)

    def judge_plan(self, view: PlanView) -> None:
        """Show a sharding plan; what is found replaces what was found when less was known."""
        for check in self.needing(PlanPatterns):
            match view:
                case RuleView():
                    found = self._ask(check, check.check_rules, view)
                    self.conclusions.revise((check.code, "rules"), found)
                case ProgramPlanView():
                    found = self._ask(check, check.check_program_plan, view)
                    subject = (check.code, view.source, view.model, view.site)
                    self.conclusions.revise(subject, found)

    def judge_losses(self, view: LossView) -> None:
        """Show the losses of an optimizer's steps; what is found replaces what was found before."""
        for check in self.needing(LossWeights):
            found = self._ask(check, check.check_losses, view)
            self.conclusions.revise((check.code, view.optimizer, view.ranks), found)

    def judge_combined_losses(self, view: LossView) -> None:
        """Show losses with measured divisors; what is found replaces what was found before."""
        for check in self.needing(LossWeights):
            found = self._ask(check, check.check_combined_losses, view)
            self.conclusions.revise((check.code, "measured", view.optimizer, view.ranks), found)

    def judge_feeds(self, view: FeedView) -> None:
        """Show what a model was fed."""
        for check in self.needing(ModelFed):
            self._take(check, check.check_feeds, view)

    def judge_routing(self, view: RoutingView) -> None:
        """Show the routing in a model; what is found replaces what was found before."""
        for check in self.needing(Routing):
            found = self._ask(check, check.check_routing, view)
            self.conclusions.revise((check.code, "routing", view.model), found)

    def judge_exchange(self, view: UnfitExchange | RoundTrip) -> None:
        """Show an exchange of tokens; what is found replaces what was found of the same one."""
        for check in self.needing(TokensExchanged):
            match view:
                case UnfitExchange():
                    found = self._ask(check, check.check_unfit_exchange, view)
                    call = view.any_exchange.call
                    subject = (check.code, call.group, call.collective_seq_id)
                    self.conclusions.revise(subject, found)
                case RoundTrip():
                    self._take(check, check.check_round_trip, view)

    def judge_gradients(self, view: GradientView) -> None:
        """Show gradients of a model; what is found replaces what was found before."""
        for check in self.needing(GradientSums):
            found = self._ask(check, check.check_gradients, view)
            self.conclusions.revise((check.code, "gradients", view.model), found)

    def judge_sums(self, view: SumsView) -> None:
        """Show which gradients ranks sum; what is found replaces what was found before."""
        for check in self.needing(GradientSums):
            found = self._ask(check, check.check_sums, view)
            self.conclusions.revise((check.code, "sums", view.model, view.ranks), found)

    def judge_sequences(self, view: SequenceView) -> None:
        """Show what a group does with its sequences; what is found replaces what was found."""
        for check in self.needing(SequenceUse):
            found = self._ask(check, check.check_sequences, view)
            self.conclusions.revise((check.code, view.how, view.ranks), found)

    def judge_lone_steps(self, alignment: Alignment[SteppedAlone]) -> None:
        """Show the ranks that train alone so far; what is found replaces what was found before."""
        for check in self.needing(SteppedAlone):
            found = self._ask(check, check.check_alignment, alignment)
            self.conclusions.revise((check.code, alignment.key), found)

    def judge_missing_file(self, missing: MissingFile) -> None:
        """Show a file for lack of which a rank ended."""
        for check in self.needing(FileAccess):
            self._take(check, check.check_missing_file, missing)

    def judge_event(self, event: Event, states: Callable[[], States]) -> None:
        """Show one event to the checks that judge single events."""
        kind = type(event)
        if kind not in self._listeners:
            self._listeners[kind] = [c for c in self.needing(kind) if _judges_events(c)]
        for check in tuple(self._listeners[kind]):
            self._take(check, check.check_event, event, states())

    def judge_ranks(self, states: States) -> None:
        """Show the job as a whole."""
        for check in tuple(self._checks):
            self._take(check, check.check_ranks, states)

    def _take(self, check: Check, judge: Callable[..., Iterator[Finding]], *views: object) -> bool:
        found = self._ask(check, judge, *views)
        for finding in found:
            self.conclusions.add(finding)
        return any(finding.severity is not Severity.INFO for finding in found)

    def _ask(
        self, check: Check, judge: Callable[..., Iterator[Finding]], *views: object
    ) -> list[Finding]:
        try:
            return list(judge(*views))
        except Exception as error:  # noqa: BLE001 - a check must not end the report (STYLE 4.11)
            self._disable(check, error)
            return []

    def _disable(self, check: Check, error: Exception) -> None:
        self._checks.remove(check)
        self._listeners.clear()
        self.disabled[check.code] = f"the check crashed: {type(error).__name__}: {error}"
        finding = CrashedCheck().from_exception(check.code, error, traceback.format_exc())
        self.conclusions.add(finding)


def _judges_events(check: Check) -> bool:
    return type(check).check_event is not Check.check_event
