"""The contract of an aligner, which puts events of ranks side by side."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import ClassVar, Final

from distdiag.config.numerics import USUAL, NumericsConfig
from distdiag.config.placement_rules import PlacementRule
from distdiag.engine.bounded import Forgotten
from distdiag.engine.ranks import RankTracker
from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.findings.store import FindingStore
from distdiag.views.base import View
from distdiag.views.rank_states import RankState


@dataclass(frozen=True, slots=True)
class NothingThere:
    """The run holds nothing of what a view shows, so checks of it have nothing to judge.

    `subject` is what there was none of, in a word or two that several reasons may share, such as
    ``experts``. Make it a constant of the module: `subjects` finds those.
    """

    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class NotObserved:
    """What a view shows was not observed, or not wholly, so checks of it may have missed some."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A profile or an option leaves it out."""

    reason: str


Gap = NothingThere | NotObserved | LeftOut

LIGHT: Final = LeftOut("the light profile leaves the steps out")
DESELECTED: Final = LeftOut("left out by --select or --ignore")


@dataclass(slots=True)
class CallOrder:
    """Since when the calls of ranks are paired wrongly, so that their order is not known."""

    doubted_since_ns: int | None = None

    def doubt(self, since_ns: int) -> None:
        """Take note that calls do not match from this time on."""
        known = self.doubted_since_ns
        self.doubted_since_ns = since_ns if known is None else min(known, since_ns)


@dataclass(frozen=True, slots=True)
class Job:
    """What an aligner may know of the run.

    `world` are the observed ranks. `states` returns what is known of each of them now. `rules` are
    the user's own sharding plan. `only_start`: the profile leaves the steps of models out.
    `hang_timeout_s` is the user's threshold in seconds; None lets the duration of steps decide.
    `numerics` holds the thresholds of the checks of numbers. Tables that are full tell `forgotten`.
    """

    world: RankSet
    states: Callable[[], Mapping[int, RankState]]
    trackers: Mapping[int, RankTracker]
    store: FindingStore
    order: CallOrder
    rules: Sequence[PlacementRule] = ()
    only_start: bool = False
    hang_timeout_s: float | None = None
    numerics: NumericsConfig = USUAL
    forgotten: Forgotten = field(default_factory=Forgotten)


class Aligner:
    """Takes in events of the types that it `needs`, and yields the views that it `builds`.

    A generator may use what a ``yield`` returns: whether a check found something of warning or
    above in the view. An aligner is fed only if some check judges one of its views.
    """

    needs: ClassVar[tuple[type[Event], ...]]
    builds: ClassVar[tuple[type[View | Event], ...]]
    """What it yields, and the events of whose absence it knows the reason."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def feed(self, event: Event) -> Iterable[View]:
        """Take in one event of one rank; return the views that it completes."""
        return ()

    def tick(self, now_ns: int, unseen: Collection[int]) -> Iterable[View]:
        """Let time pass; nothing can be heard now of the ranks in `unseen`."""
        return ()

    def end(self) -> Iterable[View]:
        """Return, at the end of the run, the views of what not all ranks have reached."""
        return ()

    def gaps(self) -> Mapping[type[View | Event], Gap]:
        """Say of which views there were none, or not all, and why; asked at any time."""
        return {}


@cache
def find_aligners() -> tuple[type[Aligner], ...]:
    """Import every module of the engine and return the aligners that they define."""
    return tuple(
        value
        for module in _modules()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Aligner)
        and value is not Aligner
        and value.__module__ == module.__name__
    )


@cache
def subjects() -> Mapping[str, str]:
    """Return what a run may hold nothing of, by the reasons that `not_checked` gives for it."""
    found: dict[str, str] = {}
    for module in _modules():
        for value in vars(module).values():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, NothingThere):
                    found[each.reason] = each.subject
    return found


def _modules() -> Iterator[ModuleType]:
    package = import_module(__package__)
    for module in walk_packages(package.__path__, f"{__package__}."):
        yield import_module(module.name)
