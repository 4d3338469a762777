"""Views of what ranks decide by the samples of one of them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from distdiag.events.data import EpochFed, MetricGiven
from distdiag.events.files import FileAccess
from distdiag.views.base import View


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
class ResumedPassView(View):
    """A pass over a data set after one that was broken off, by rank.

    Of `after` as many batches were fetched without training as `before` had come to.
    """

    before: Mapping[int, EpochFed]
    after: Mapping[int, EpochFed]


@dataclass(frozen=True, slots=True)
class PartCounts:
    """How often a part of a sample was the same when the sample was read again.

    `num_again` samples came again on the same rank, `num_changed` of them otherwise; `num_shared`
    came on several ranks, `num_different` of them otherwise. `is_whole`: it holds whole numbers.
    """

    name: str
    is_whole: bool
    num_again: int
    num_changed: int
    num_shared: int
    num_different: int


@dataclass(frozen=True, slots=True)
class SampleContentsView(View):
    """What samples with the same index held on the ranks that divide a data set by it."""

    passes: Mapping[int, EpochFed]
    parts: tuple[PartCounts, ...]

    @property
    def supersedes(self) -> Hashable:
        """What was said when fewer had come again."""
        return ("samples", self.passes[min(self.passes)].stream)


@dataclass(frozen=True, slots=True)
class MetricView(View):
    """The same value of a metric, as each rank that trains the model gives it to its scheduler."""

    by_rank: Mapping[int, MetricGiven]

    @property
    def supersedes(self) -> Hashable:
        """What was said of values before."""
        return ("metric", self.by_rank[min(self.by_rank)].name)
