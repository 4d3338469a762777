"""PAR005: batch normalisation uses the statistics of the few samples of one rank."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import ModelFed, NormStatistics
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import NormalisedFeeds

# How far the means of one layer differ between ranks, and what chance would explain.

_MUCH: Final = 0.5
_BEYOND: Final = 8.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of means over ranks, relative to the deviation of values and to chance.

    The deviation was estimated from `num_free` free values.
    """

    of_deviation: float
    of_chance: float
    num_free: int

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it matters, and independent values would hardly ever give it."""
        # With few values their own deviation is not well known.
        bound = _BEYOND * (1 + 8 / self.num_free)
        return self.of_deviation >= _MUCH and self.of_chance >= bound


def spread_over_ranks(
    passes: Sequence[Sequence[tuple[NormStatistics, ...]]], name: str
) -> Spread | None:
    """Compare the means of one layer on all ranks, over all passes and channels.

    None: some ranks have none in some pass, or there are too few values.
    """
    layers = [[_named(norms, name) for norms in by_rank] for by_rank in passes]
    known = [[each for each in by_rank if each is not None] for by_rank in layers]
    sizes = {len(each.means) for by_rank in known for each in by_rank}
    is_whole = all(len(t) == len(by_rank) > 1 for t, by_rank in zip(known, layers, strict=True))
    if not known or not is_whole or len(sizes) != 1:
        return None
    least = min(each.num_values for by_rank in known for each in by_rank)
    if least < 2:
        return None
    between = []
    for channel in range(sizes.pop()):
        own = fmean(
            each.variances[channel] * each.num_values / (each.num_values - 1)
            for by_rank in known
            for each in by_rank
        )
        if own > 0:
            apart = [variance(each.means[channel] for each in by_rank) for by_rank in known]
            between.append(fmean(apart) / own)
    if not between:
        return None
    ratio = fmean(between)
    num_free = sum(each.num_values - 1 for by_rank in known for each in by_rank)
    return Spread(math.sqrt(2 * ratio), ratio * least, num_free)


def _named(norms: tuple[NormStatistics, ...], name: str) -> NormStatistics | None:
    return next((each for each in norms if each.name == name), None)


# The check, and what counts as a spread beyond chance.

_TINY: Final = 2
_SMALL: Final = 4
_LEAST_PASSES: Final = 4
_MOST_SHOWN: Final = 8


class LocalBatchStatistics(Check[NormalisedFeeds]):
    """Batch normalisation uses the statistics of the few samples of one rank.

    ## What you see
    The model trains to a worse result than with the same batch on one GPU. Each rank normalises by
    the mean and variance of its own one or two samples, which say little of the whole batch.

    ## Example
        # wrong: two images on each GPU
        model = DistributedDataParallel(detector)
        # right
        detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)
        model = DistributedDataParallel(detector)

    ## How to fix
    Convert the model with `SyncBatchNorm.convert_sync_batchnorm(model)` before it is wrapped (it
    needs GPUs). Or leave the batch-norm layers in `eval()`, or use a norm that does not use the
    batch (`nn.GroupNorm`).

    Changes: By what each layer normalises; a little more communication.

    Leaves: Running statistics that were gathered until now.

    ## When it is not a defect
    The mean of a layer's input, printed on each rank, is nearly the same.

    If so, add `ignore = ["PAR005"]` to `distdiag.toml`. For three or four samples it is only a
    note.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    code = "PAR005"
    name = "local-batch-statistics"
    severity = Severity.WARNING

    def check(self, view: NormalisedFeeds) -> Iterator[Finding]:
        """Compare what the layers normalise by on each rank."""
        if len(view.passes) < _LEAST_PASSES or not all(map(_has_own_samples, view.passes)):
            return
        layers = [[by_rank[rank].norms for rank in by_rank] for by_rank in view.passes]
        few = _few_samples(layers)
        spreads = {name: spread_over_ranks(layers, name) for name in few}
        apart = {name: s for name, s in spreads.items() if s is not None and s.is_beyond_chance}
        if not apart:
            return
        last = view.passes[-1]
        first, number = last[min(last)], max(few[name] for name in apart)
        most = max(apart, key=lambda name: apart[name].of_deviation)
        is_sure = number <= _TINY and not view.is_shared_work
        yield self.finding(
            f"{first.num_local_norms} batch-norm layers of {view.model} normalise by the "
            f"statistics of each rank's own {number} samples: the means of {most} are "
            f"{apart[most].of_deviation:.1f} standard deviations apart",
            ranks=view.ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=tuple(few)[:_MOST_SHOWN],
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.8,
            evidence=(_evidence(view, most, apart[most]),),
        )


def _evidence(view: NormalisedFeeds, name: str, spread: Spread) -> Evidence:
    return Evidence(
        ranks=view.ranks,
        summary=f"in {len(view.passes)} steps the means of {name} differ between the ranks by "
        f"{spread.of_deviation:.2f} standard deviations, {spread.of_chance:.0f} times the variance "
        "that chance explains",
        values={"of_deviation": spread.of_deviation, "of_chance": spread.of_chance},
    )


def _few_samples(layers: Sequence[Sequence[tuple[NormStatistics, ...]]]) -> dict[str, int]:
    """Return the layers that never have many samples, and how many at most."""
    most: dict[str, int] = {}
    for each in (each for by_rank in layers for norms in by_rank for each in norms):
        most[each.name] = max(each.num_samples, most.get(each.name, 0))
    return {name: number for name, number in most.items() if number <= _SMALL}


def _has_own_samples(by_rank: Mapping[int, ModelFed]) -> bool:
    fed = list(by_rank.values())
    return len({each.inputs for each in fed}) == len(fed) > 1
