"""Views of what models are fed over ranks: the same backward passes side by side."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from distdiag.events.data import EpochFed, MetricGiven, ModelFed
from distdiag.events.files import FileAccess
from distdiag.events.ranks import RankSet
from distdiag.views.base import View


@dataclass(frozen=True, slots=True)
class FeedView(View):
    """What all ranks that train one model together were given, for several backward passes.

    `is_shared_work`: some ranks exchange more than gradients and parameters (activations, rewards
    of what they did with the samples), so that they may be
    meant to work on the same samples.
    """

    model: str
    ranks: RankSet
    passes: tuple[Mapping[int, ModelFed], ...]
    is_shared_work: bool


class NormalisedFeeds(FeedView):
    """The same of models with a layer that normalises by the statistics of one rank's batch."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LocalEvaluationView(View):
    """Files that some ranks write after they have evaluated their own part of a data set.

    Between the first batch of that pass, which all ranks in `passes` made over parts of their own,
    and the write these ranks have heard nothing of the others, and not trained. `writes` are the
    last ones at one place of the program, by rank; `num_writes` there were in all.
    """

    passes: Mapping[int, EpochFed]
    writes: Mapping[int, FileAccess]
    num_writes: int

    @property
    def supersedes(self) -> Hashable:
        """What was said when there were fewer."""
        return ("evaluation", next(iter(self.writes.values())).site)


@dataclass(frozen=True, slots=True)
class MetricView(View):
    """The same value of a metric, as each rank that trains the model gives it to its scheduler."""

    by_rank: Mapping[int, MetricGiven]

    @property
    def supersedes(self) -> Hashable:
        """What was said of values before."""
        return ("metric", self.by_rank[min(self.by_rank)].name)
