"""DAT003: ranks shuffle one data set differently, so that their parts do not fit together."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import (
    has_read_once,
    num_left_out,
    num_read_twice,
    one_of_each_part,
    place_of,
    sampler_phrase,
)
from distdiag.events.data import MOST_LEAST, EpochFed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OwnListView, SampledEpochView

_MOST_SEEDS: Final = 4
_FEWEST: Final = 4
_MANY: Final = 8
"""A data set may well have some samples twice; then a rank would have them twice, too."""
_WHOLE: Final = 0.9
"""The last batch of a pass may be dropped."""
_FEW: Final = 0.05
_MOST: Final = 0.8
"""Of ranks that each draw half of one data set a quarter of all reads are of samples that the other
one has, and of many ranks a third; of ranks that all read the whole, half of them or more."""


class DivergentSamplerOrder(Check[SampledEpochView | OwnListView]):
    """Ranks shuffle one data set differently, so that their parts overlap.

    ## What you see
    In each epoch some samples are trained on several times and others never. Each rank shuffles all
    samples and takes its part: the parts are disjoint only if all ranks shuffle alike.

    ## Example
        # wrong
        sampler = DistributedSampler(data, seed=rank)
        files = os.listdir(folder)  # in another order on each machine
        # right
        sampler = DistributedSampler(data, seed=0)
        files = sorted(os.listdir(folder))

    ## How to fix
    Give the sampler the same seed on all ranks: a constant, or a number that rank 0 draws and
    broadcasts. Where the data sets differ in their order, sort what they are made of.

    Changes: Which samples each rank reads.

    Leaves: What was trained on too often or never until now.

    ## When it is not a defect
    The ranks have data sets of their own, which happen to have equal sizes.

    If so, add `ignore = ["DAT003"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    - https://github.com/pytorch/pytorch/issues/70103
    """

    code = "DAT003"
    name = "divergent-sampler-order"
    severity = Severity.WARNING

    def check(self, view: SampledEpochView | OwnListView) -> Iterator[Finding]:
        """Compare what the ranks of different parts read in one pass."""
        if isinstance(view, OwnListView):
            yield from self._of_lists(view)
            return
        if not _are_parts(view.by_rank):
            return
        parts = one_of_each_part(view.by_rank)
        sizes = {one.num_samples for one in parts.values()}
        if len(sizes) > 1 or not all(map(has_read_once, parts.values())):
            return  # each rank has a data set of its own, or samples are drawn with replacement
        if len({(one.sampler.epoch, one.is_training) for one in parts.values()}) > 1:
            return  # these are not the same pass
        twice = num_read_twice(parts.values())
        if twice is not None and twice > _num_padded(parts) + _FEWEST - 1:
            left_out = num_left_out(parts.values())
            also = f", and {left_out} of {min(sizes)} by none" if _are_whole(parts) else ""
            yield self._differs(
                view, parts, f"{twice} samples are read by several ranks{also}", "seed"
            )
        elif twice is None and _have_seeds_of_their_own(parts):
            yield self._differs(
                view, parts, "parts are cut out of orders with different seeds", "seed"
            )
        elif twice == 0:
            number = _num_equal(parts)
            if number >= _MANY:
                what = f"{number} samples are the same on several ranks though their indices differ"
                yield self._differs(view, parts, what, "order of the data set")

    def _of_lists(self, view: OwnListView) -> Iterator[Finding]:
        """Compare the samples themselves where each rank has made a list of its own."""
        passes = view.by_rank
        # Where a sampler chooses some of the samples, others may choose them as well.
        is_whole = all(
            each.is_complete and each.is_training and each.num_indices >= _WHOLE * each.num_samples
            for each in passes.values()
        )
        num_equal, share = _in_common(passes) if is_whole else (0, 0.0)
        if num_equal < _MANY or share < _FEW:
            return
        first = passes[min(passes)]
        is_known = view.are_reduced or any(one.members for one in passes.values())
        yield self.finding(
            f"about {share:.0%} of the samples that ranks read in pass {first.number + 1} over "
            f"{first.dataset} are also read by another rank: each rank has a list of its own, and "
            "these lists are not cut out of the same order",
            ranks=RankSet(passes),
            step=first.step,
            location=place_of(passes),
            subjects=(first.dataset,),
            grade=Grade.LIKELY if is_known else Grade.NOTE,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"reads {one.num_indices} samples, no two of which are equal; of "
                    f"{len(one.least)} that were compared, {num_equal} are those of another rank",
                )
                for rank, one in passes.items()
            ),
            why="In each epoch some samples are trained on several times and others never. The "
            "order of a set, of `os.listdir` or of a shuffle differs between processes, so that "
            "the parts that ranks take of it overlap.",
        )

    def _differs(
        self, view: SampledEpochView, parts: Mapping[int, EpochFed], what: str, cause: str
    ) -> Finding:
        first = parts[min(parts)]
        seeds = list(dict.fromkeys(str(one.sampler.seed) for one in parts.values()))
        shown = f" ({', '.join(seeds[:_MOST_SEEDS])})" if cause == "seed" and len(seeds) > 1 else ""
        is_known = view.are_reduced or any(one.members for one in parts.values())
        return self.finding(
            f"{what} in pass {first.number + 1} over {first.dataset}: the {cause} is not the same"
            f"{shown}",
            ranks=RankSet(parts),
            step=first.step,
            location=place_of(parts),
            subjects=(first.sampler.chain[-1],),
            grade=Grade.LIKELY if is_known else Grade.NOTE,
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{sampler_phrase(one.sampler)} over {one.num_samples} samples begins "
                    f"with {', '.join(map(str, one.first))}",
                    values={"seed": one.sampler.seed, "num_indices": one.num_indices},
                )
                for rank, one in parts.items()
            ),
        )


def _are_parts(by_rank: Mapping[int, EpochFed]) -> bool:
    samplers = [one.sampler for one in by_rank.values()]
    numbers = {sampler.num_replicas for sampler in samplers}
    is_cut = len(numbers) == 1 and None not in numbers and numbers != {1}
    # A pass that was ended early need not be as long as the others.
    return is_cut and len({sampler.replica for sampler in samplers}) > 1


def _have_seeds_of_their_own(parts: Mapping[int, EpochFed]) -> bool:
    seeds = {one.sampler.seed for one in parts.values()}
    is_shuffled = all(one.sampler.shuffle and not one.is_ascending for one in parts.values())
    return is_shuffled and None not in seeds and len(seeds) > 1


def _num_padded(parts: Mapping[int, EpochFed]) -> int:
    """Return how many samples may be read twice so that all parts are of one length."""
    total = sum(one.num_indices for one in parts.values())
    return max(0, total - max(one.num_samples for one in parts.values()))


def _are_whole(parts: Mapping[int, EpochFed]) -> bool:
    is_each = len(parts) == next(iter(parts.values())).sampler.num_replicas
    return is_each and all(one.is_complete for one in parts.values())


def _in_common(passes: Mapping[int, EpochFed]) -> tuple[int, float]:
    """Return how many of the compared samples several ranks have, and the share of such reads.

    Nothing where ranks have all, or all but few: they read one data set, each by itself.
    """
    lists = {one.least for one in passes.values()}
    if len(lists) < 2 or not all(lists) or len({one.num_samples for one in passes.values()}) > 2:
        return 0, 0.0
    # What is greater than the last one of a list that is cut may be in it or not.
    ends = [each[-1] for each in lists if len(each) == MOST_LEAST]
    reads = [digest for each in lists for digest in each if not ends or digest <= min(ends)]
    counts = Counter(reads)
    share = 1 - len(counts) / len(reads)
    num_equal = sum(number > 1 for number in counts.values())
    return (num_equal, share) if share <= _MOST * (1 - 1 / len(lists)) else (0, 0.0)


def _num_equal(parts: Mapping[int, EpochFed]) -> int:
    """Count contents that several ranks have read, if no rank has read any twice."""
    seen: set[str] = set()
    twice: set[str] = set()
    for one in parts.values():
        contents = set(one.contents)
        if len(contents) < len(one.contents):
            return 0  # the data set itself has equal samples
        twice |= seen & contents
        seen |= contents
    return len(twice)
