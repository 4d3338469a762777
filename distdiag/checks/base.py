"""The contract of a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from distdiag.events.base import Event
from distdiag.events.models import Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.alignment import Alignment
from distdiag.views.data import FeedView
from distdiag.views.files import MissingFile, Race
from distdiag.views.gradients import GradientView, SumsView
from distdiag.views.losses import LossView
from distdiag.views.models import (
    ContentView,
    ModelView,
    ProgramPlanView,
    ReplicaView,
    RuleView,
    ScalingView,
    UntrainedView,
)
from distdiag.views.rank_states import RankState
from distdiag.views.routing import RoundTrip, RoutingView, UnfitExchange
from distdiag.views.sequences import SequenceView


class Check:
    """Decide about events. Override the methods whose views the decision needs.

    A check is pure: it gets frozen values and yields findings. It prints, stores and waits for
    nothing. An exception is caught by the engine, which disables the check and reports DIA001.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    needs: ClassVar[tuple[type[Event], ...]]
    moments: ClassVar[tuple[Moment, ...]] = ()
    """When the copies were looked at that `check_replicas` judges; empty: at any time."""
    absent: ClassVar[str] = ""
    """Why the check has looked at nothing, if no event of a run `concerns` it."""
    covers: ClassVar[tuple[str, ...]] = ()
    """Codes of findings that are evidence for one of this check if they name the same line."""

    why: ClassVar[str] = ""
    fix: ClassVar[str] = ""
    fix_changes: ClassVar[str] = ""
    fix_leaves: ClassVar[str] = ""
    disproof: ClassVar[str] = ""

    @classmethod
    def compares_ranks(cls) -> bool:
        """Say whether the check judges only what several ranks have in common.

        The views that judge one rank by itself are single events and the state of the job.
        """
        judges_one = cls.check_event is not Check.check_event or (
            cls.check_ranks is not Check.check_ranks
        )
        return bool(cls.needs) and not judges_one

    def concerns(self, event: Event) -> bool:
        """Say whether an event tells of something that the check looks at; asked if `absent`."""
        return isinstance(event, self.needs)

    def check_event(self, event: Any, states: Mapping[int, RankState]) -> Iterator[Finding]:  # noqa: ANN401
        """Judge one event of one rank."""
        yield from ()

    def check_alignment(self, alignment: Alignment[Any]) -> Iterator[Finding]:
        """Judge a point where all expected ranks are present and their events are not all equal."""
        yield from ()

    def check_missing(self, alignment: Alignment[Any]) -> Iterator[Finding]:
        """Judge a point that some ranks never reached; `alignment.trigger` says how we know."""
        yield from ()

    def check_race(self, race: Race) -> Iterator[Finding]:
        """Judge accesses to files that nothing orders; a race that grew is shown again."""
        yield from ()

    def check_missing_file(self, missing: MissingFile) -> Iterator[Finding]:
        """Judge a rank that ended because a file was not there."""
        yield from ()

    def check_model(self, view: ModelView) -> Iterator[Finding]:
        """Judge the plans of one model, once all ranks that keep it together have told theirs."""
        yield from ()

    def check_replicas(self, view: ReplicaView) -> Iterator[Finding]:
        """Judge tensors that differ between the ranks that should hold the same."""
        yield from ()

    def check_contents(self, view: ContentView) -> Iterator[Finding]:
        """Judge what the ranks hold of a model when it is used for the first time."""
        yield from ()

    def check_scaling(self, view: ScalingView) -> Iterator[Finding]:
        """Judge by what the ranks of one model multiplied their gradients."""
        yield from ()

    def check_rules(self, view: RuleView) -> Iterator[Finding]:
        """Judge the user's own sharding plan; it is shown again when more is known."""
        yield from ()

    def check_program_plan(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Judge a plan that the program applied; it is shown again when more is known."""
        yield from ()

    def check_untrained(self, view: UntrainedView) -> Iterator[Finding]:
        """Judge, at the end, parameters of an optimizer that had no gradient at any look."""
        yield from ()

    def check_losses(self, view: LossView) -> Iterator[Finding]:
        """Judge how much the elements of losses weigh; shown again after each further step."""
        yield from ()

    def check_combined_losses(self, view: LossView) -> Iterator[Finding]:
        """Judge the same where measured gradients tell how they were combined.

        Where a wrapper tells it, and ranks share sequences, that is shown, too.
        """
        yield from ()

    def check_feeds(self, view: FeedView) -> Iterator[Finding]:
        """Judge what ranks that train one model together were given, over several passes."""
        yield from ()

    def check_routing(self, view: RoutingView) -> Iterator[Finding]:
        """Judge how a model routes tokens to experts; shown again after further steps."""
        yield from ()

    def check_unfit_exchange(self, view: UnfitExchange) -> Iterator[Finding]:
        """Judge an exchange of tokens that does not fit; shown again when more ranks came."""
        yield from ()

    def check_round_trip(self, view: RoundTrip) -> Iterator[Finding]:
        """Judge tokens of which not as many come back as were sent."""
        yield from ()

    def check_gradients(self, view: GradientView) -> Iterator[Finding]:
        """Judge how gradients were combined and scaled; shown again after further steps."""
        yield from ()

    def check_sums(self, view: SumsView) -> Iterator[Finding]:
        """Judge which gradients ranks sum by hand, and which not; shown again at the end."""
        yield from ()

    def check_sequences(self, view: SequenceView) -> Iterator[Finding]:
        """Judge how ranks share sequences; shown again after further passes."""
        yield from ()

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Judge the job as a whole: when it stalled, when a rank left badly, and at the end."""
        yield from ()

    def finding(  # noqa: PLR0913 (a finding has as many parts; all but one are keywords)
        self,
        message: str,
        *,
        ranks: RankSet,
        evidence: tuple[Evidence, ...],
        step: int | None = None,
        location: Location | None = None,
        subjects: tuple[str, ...] = (),
        severity: Severity | None = None,
        grade: Grade = Grade.PROVEN,
        confidence: float = 0.95,
        **texts: str,
    ) -> Finding:
        """Build a finding that carries this check's code, name and texts.

        `texts` may replace why, fix, fix_changes, fix_leaves and disproof by more specific ones.
        A note always has severity info.
        """
        standing = {
            key: texts.get(key, getattr(self, key))
            for key in ("why", "fix", "fix_changes", "fix_leaves", "disproof")
        }
        return Finding(
            code=self.code,
            name=self.name,
            severity=Severity.INFO if grade is Grade.NOTE else severity or self.severity,
            grade=grade,
            confidence=confidence,
            message=message,
            ranks=ranks,
            evidence=evidence,
            step=step,
            location=location,
            subjects=subjects,
            **standing,
        )
