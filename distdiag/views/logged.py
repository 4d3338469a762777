"""Views of the numbers of a training: those that it logs, and those that its losses hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from distdiag.config.numerics import USUAL, NumericsConfig
from distdiag.events.base import CallSite
from distdiag.events.logged import NOWHERE, CodesChosen, LossNumbers, MemoryUse, Warned
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class LoggedSeries:
    """The values of one name that one rank has logged, each with the steps that came before."""

    name: str
    logger: str
    site: CallSite
    points: tuple[tuple[int, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The values in their order."""
        return tuple(value for _, value in self.points)

    @property
    def num_updates(self) -> int:
        """How many steps of optimizers lie between the first and the last value."""
        return self.points[-1][0] - self.points[0][0] if self.points else 0

    def after(self, num_updates: int) -> tuple[float, ...]:
        """Return the values that were logged after more than so many steps."""
        return tuple(value for steps, value in self.points if steps > num_updates)


SeriesByName = Mapping[str, LoggedSeries]


@dataclass(frozen=True, slots=True)
class LoggedView(View):
    """What each rank has logged so far, by name."""

    by_rank: Mapping[int, SeriesByName]
    thresholds: NumericsConfig = USUAL

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said when less was logged."""
        return "logged"


@dataclass(frozen=True, slots=True)
class LossView(View):
    """The passes of each rank from one line of the program that were looked at, in their order.

    `logged` is what the ranks have logged beside. The ranks `varied` are known to have given a
    model different batches.
    """

    site: CallSite
    by_rank: Mapping[int, tuple[LossNumbers, ...]]
    logged: Mapping[int, SeriesByName] = field(default_factory=dict)
    thresholds: NumericsConfig = USUAL
    varied: frozenset[int] = frozenset()

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer passes were known."""
        return "losses", self.site.location


@dataclass(frozen=True, slots=True)
class CodebookView(View):
    """The windows in which the codes of one codebook were counted, by rank."""

    codebook: str
    by_rank: Mapping[int, tuple[CodesChosen, ...]]
    site: CallSite = NOWHERE
    thresholds: NumericsConfig = USUAL

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer windows were known."""
        return "codes", self.codebook


@dataclass(frozen=True, slots=True)
class WarningView(View):
    """A warning of one topic at one place, with the first event of each rank that has shown it."""

    topic: str
    by_rank: Mapping[int, Warned]

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer ranks had shown it."""
        return "warned", self.topic, next(iter(self.by_rank.values())).site.location


@dataclass(frozen=True, slots=True)
class ParameterView(View):
    """The numbers of elements of the tensors of a model, as one rank holds it at the start."""

    model: str
    rank: int
    sizes: Mapping[str, int]
    site: CallSite
    thresholds: NumericsConfig = USUAL

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said of the model of another rank: all have the same."""
        return "parameters", self.model


@dataclass(frozen=True, slots=True)
class MemoryView(View):
    """How the memory of one kind has developed on each rank: samples at ever higher steps.

    `first_passes` are the steps at which ranks had read a whole data set for the first time.
    """

    memory: str
    by_rank: Mapping[int, tuple[MemoryUse, ...]]
    first_passes: Mapping[int, int] = field(default_factory=dict)

    is_of_one_rank: ClassVar[bool] = True

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer samples were known."""
        return "memory", self.memory
