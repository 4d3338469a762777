"""MOE012: the gradients of experts are divided by another number than those of dense parameters."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec

from distdiag.checks.base import Check
from distdiag.events.gradients import AutogradNode
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.gradients import (
    TOLERANCE,
    Combined,
    GradientSample,
    GradientView,
    Ranks,
    candidates,
    combined_on,
    divisors,
    one_of,
)

# Which parameters are those of experts, by one rank's graph: gradients reach them behind one
# all-to-all, and not without, since the tokens were sent there. Behind two all-to-alls a parameter
# is on the side of the tokens again.

_ALIKE: Final = 0.01
"""So close the ratios of sums and of norms are where a gradient was only scaled."""


@dataclass(frozen=True, slots=True)
class ExpertPath:
    """An all-to-all, by its place among the autograd nodes of a rank, and the experts behind it."""

    place: int
    exchange: Ranks
    names: frozenset[str]


def expert_paths(sample: GradientSample, rank: int) -> Iterator[ExpertPath]:
    """Yield the all-to-alls of a rank that have experts behind them, the last layer first."""
    nodes, exchanges = sample.by_rank[rank].nodes, sample.exchanges[rank]
    if not nodes:
        return
    depths = _depths(nodes, exchanges)
    least: dict[str, int] = {}
    for place, depth in depths.items():
        for name in nodes[place].parameters:
            least[name] = min(depth, least.get(name, depth))
    for place, depth in depths.items():
        reach = _reach(nodes, exchanges, place)
        if exchanges[place] and depth % 2 == 1 and reach is not None:
            names = {name for each in reach for name in nodes[each].parameters}
            mine = frozenset(name for name in names if least[name] == depth)
            if mine:
                yield ExpertPath(place, exchanges[place], mine)


def _depths(nodes: Sequence[AutogradNode], exchanges: Sequence[Ranks]) -> dict[int, int]:
    """Return how many all-to-alls at least lie between the loss and each autograd node."""
    depths = {0: 0}
    level, depth = [0], 0
    while level:
        deeper = []
        for place in level:  # it grows meanwhile
            for below in nodes[place].below:
                if below in depths:
                    continue
                if exchanges[below]:
                    deeper.append(below)
                else:
                    depths[below] = depth
                    level.append(below)
        depth += 1
        level = [place for place in dict.fromkeys(deeper) if place not in depths]
        depths |= dict.fromkeys(level, depth)
    return depths


def _reach(
    nodes: Sequence[AutogradNode], exchanges: Sequence[Ranks], place: int
) -> list[int] | None:
    """Return a node and all that follow it before the next all-to-all; None if unknown."""
    reach = [place]
    for each in reach:  # it grows meanwhile
        if not nodes[each].is_bounded:
            return None
        reach += [b for b in nodes[each].below if not exchanges[b] and b not in reach]
    return reach


def factor_of(sample: GradientSample, rank: int, path: ExpertPath) -> float | None:
    """Return by what the backward pass of an all-to-all multiplies gradients; None if unclear.

    What a rank sends another one receives: over all ranks only a factor changes the norm.
    """
    mine = [each.place for each in expert_paths(sample, rank) if each.exchange == path.exchange]
    index = mine.index(path.place)
    found: list[AutogradNode] = []
    for other in path.exchange:
        if other not in sample.by_rank:
            return None
        theirs = [e for e in expert_paths(sample, other) if e.exchange == path.exchange]
        if len(theirs) != len(mine):
            return None
        found.append(sample.by_rank[other].nodes[theirs[index].place])
    given = math.hypot(*(each.given.norm for each in found))
    passed = math.hypot(*(each.passed.norm for each in found))
    is_whole = sum(e.given.num_elements - e.passed.num_elements for e in found) == 0
    return passed / given if is_whole and given > 0 and math.isfinite(passed) else None


def scales_of(sample: GradientSample, rank: int) -> frozenset[float]:
    """Return by what other functions of the program multiply gradients as a whole."""
    found: set[float] = set()
    exchanges = sample.exchanges[rank]
    for place, node in enumerate(sample.by_rank[rank].nodes):
        given, passed = node.given, node.passed
        is_plain = given.num_elements == passed.num_elements > 0 and not exchanges[place]
        if not is_plain or not given.norm > 0 or given.total == 0:
            continue
        by_norm, by_sum = passed.norm / given.norm, passed.total / given.total
        is_scaled = abs(abs(by_sum) - by_norm) <= _ALIKE * by_norm
        if is_scaled and abs(by_norm - 1) > _ALIKE:
            found.add(round(by_norm, 3))
    return frozenset(found)


# A rank's experts get the gradients of all tokens that an all-to-all has brought to it, so that the
# sum over the ranks of the all-to-all is made already.


class Coverage(Enum):
    """Whose tokens the gradient of an expert sums up, beside that of a dense parameter."""

    SAME = auto()
    REPEATED = auto()  # all of them several times
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class ExpertGradients:
    """The experts of one rank.

    `exchange` are the ranks whose tokens reach them; `experts` says how their gradients were
    combined, `dense` how all others were; `factor` is what the backward pass of the all-to-all
    multiplies gradients by, `scales` are what other functions do. `are_different`: other ranks of
    the group hold other experts under the same names. `are_tables`: they are tables of embeddings,
    of which each sample is sent some rows.
    """

    rank: int
    step: int
    names: tuple[str, ...]
    exchange: Ranks
    dense: Combined
    experts: Combined
    factor: float
    scales: frozenset[float]
    are_different: bool
    are_tables: bool = False

    @property
    def excess(self) -> float:
        """How many times what it would be if they were dense parameters."""
        return self.factor * self.dense.divisor / self.experts.divisor

    @property
    def is_explained(self) -> bool:
        """Whether something that scales gradients elsewhere may make up for it."""
        return any(abs(self.excess * scale - 1) <= 2 * TOLERANCE for scale in self.scales)

    def multiple(self) -> int:
        """Return how many times too large they are, negative if too small; 0 if neither."""
        times = max(self.excess, 1 / self.excess)
        whole = round(times)
        if whole < 2 or abs(times - whole) > 2 * TOLERANCE * whole:
            return 0
        if len(self.dense.members) % whole:
            return 0
        return whole if self.excess > 1 else -whole


@dataclass(frozen=True, slots=True)
class _Part:
    """What one sampled step shows of one rank."""

    sample: GradientSample
    names: frozenset[str]
    exchange: Ranks
    factors: tuple[float, ...]
    dense: Combined
    scales: frozenset[float]


def expert_gradients(view: GradientView) -> dict[int, ExpertGradients]:
    """Return what is known of the experts of each rank."""
    found = {}
    for rank in view.ranks:
        samples = [sample for sample in view.samples if rank in sample.by_rank]
        parts = [_part(sample, rank, samples) for sample in samples]
        known = [part for part in parts if part is not None]
        result = _of(rank, known) if known else None
        if result is not None:
            found[rank] = result
    return found


def coverage(one: ExpertGradients, others: Mapping[int, ExpertGradients]) -> Coverage:
    """Compare whose tokens are summed up."""
    if not others.keys() >= set(one.experts.members):
        return Coverage.OTHER
    counts = Counter(rank for member in one.experts.members for rank in others[member].exchange)
    if counts.keys() != set(one.dense.members) or len(set(counts.values())) != 1:
        return Coverage.OTHER
    return Coverage.SAME if set(counts.values()) == {1} else Coverage.REPEATED


def _part(sample: GradientSample, rank: int, samples: Sequence[GradientSample]) -> _Part | None:
    paths = list(expert_paths(sample, rank))
    if len({path.exchange for path in paths}) != 1:
        return None
    factors = [factor_of(sample, rank, path) for path in paths]
    known = [factor for factor in factors if factor is not None]
    names = frozenset(name for path in paths for name in path.names)
    # With few dense parameters it takes several sampled steps to know the divisor.
    dense = combined_on([sample], rank, lambda name: name not in names)
    dense = dense or combined_on(samples, rank, lambda name: name not in names)
    if dense is None or len(known) < len(factors) or not _is_shared(sample, dense, paths):
        return None
    scales = scales_of(sample, rank)
    return _Part(sample, names, paths[0].exchange, tuple(known), dense, scales)


def _is_shared(sample: GradientSample, dense: Combined, paths: Sequence[ExpertPath]) -> bool:
    """Say whether all ranks that combine dense gradients were seen, those of the all-to-all too."""
    return set(paths[0].exchange) <= set(dense.members) <= sample.by_rank.keys()


def _of(rank: int, known: Sequence[_Part]) -> ExpertGradients | None:
    first = known[0]
    factor = one_of([factor for part in known for factor in part.factors], fewest=1)
    if factor is None or any(part.exchange != first.exchange for part in known):
        return None
    found = []
    for members in candidates(first.sample, rank):
        # Clipping scales all gradients by one factor: the ratio to the dense ones stays.
        ratios = [
            divisor / part.dense.divisor
            for part in known
            if set(members) <= part.sample.by_rank.keys()
            for divisor in divisors(part.sample, rank, members, part.names)
        ]
        if (ratio := one_of(ratios)) is not None:
            found.append(Combined(members, ratio * first.dense.divisor))
    if len(found) != 1:
        return None
    return ExpertGradients(
        rank=rank,
        step=first.sample.step,
        names=tuple(sorted(first.names)),
        exchange=first.exchange,
        dense=first.dense,
        experts=found[0],
        factor=factor,
        scales=frozenset().union(*(part.scales for part in known)),
        are_different=_are_different(first.sample, found[0].members, first.names),
        are_tables=_are_tables(first, rank),
    )


def _are_tables(part: _Part, rank: int) -> bool:
    # Of many experts only some gradients are read, though all are known by name.
    return all(
        each.is_table for each in part.sample.by_rank[rank].gradients if each.name in part.names
    )


def _are_different(sample: GradientSample, members: Ranks, names: frozenset[str]) -> bool:
    for name in sorted(names):
        there = [sample.named(rank).get(name) for rank in members]
        weights = [each.weight for each in there if each is not None and not each.members]
        if weights and max(weights) - min(weights) > 1e-6 * max(map(abs, weights)):
            return True
    return False


_MOST_NAMES: Final = 8


class ExpertGradientDivisor(Check[GradientView]):
    """The gradients of experts are divided by another number than those of dense parameters.

    ## What you see
    Experts train at a multiple of the learning rate; Adam hides it in the loss, but the gradient
    norm, clipping and weight decay are wrong and change with the number of ranks. An all-to-all
    already sums the gradients of the tokens of several ranks, and expert gradients are then divided
    by a different number than dense gradients.

    ## Example
        # 8 ranks, 4 of which share the experts: dense gradients are divided by 8
        fully_shard(experts, mesh=expert_replicas)  # wrong: these are divided by 2
        # right
        fully_shard(experts, mesh=expert_replicas)
        experts.set_gradient_divide_factor(8)

    ## How to fix
    Divide expert gradients by the number of ranks over which dense gradients are averaged
    (`p.grad /= dp_size`), not by the number of ranks that hold copies of the expert.

    Changes: The step size of the experts, the gradient norm and what is clipped.

    Leaves: The gradients of all dense parameters.

    ## When it is not a defect
    Experts are intended to train at a rate that differs by this factor.

    If so, add `ignore = ["MOE012"]` to `distdiag.toml`. It is a note for tables of embeddings,
    which often have a rate of their own.

    ## References
    - https://github.com/pytorch/pytorch/issues/160285
    - https://github.com/NVIDIA/Megatron-LM/issues/5956
    """

    code = "MOE012"
    name = "expert-gradient-divisor"
    severity = Severity.WARNING

    def check(self, view: GradientView) -> Iterator[Finding]:
        """Compare the experts of each rank with its dense parameters."""
        known = expert_gradients(view)
        same = [e for e in known.values() if coverage(e, known) is Coverage.SAME]
        wrong = [each for each in same if each.multiple() and not each.is_explained]
        if wrong and len({each.multiple() for each in wrong}) == 1 and len(wrong) == len(same):
            yield self._divided(view, wrong)
        mixed = [
            each
            for each in known.values()
            if each.are_different and coverage(each, known) is Coverage.REPEATED
        ]
        if mixed:
            yield self._mixed(view, mixed)

    def _finding(
        self,
        view: GradientView,
        message: str,
        found: Sequence[ExpertGradients],
        grade: Grade,
        confidence: float,
    ) -> Finding:
        first = found[0]
        names = dict.fromkeys(name for each in found for name in each.names)
        return self.finding(
            message,
            ranks=RankSet(each.rank for each in found),
            step=first.step,
            location=user_location(view.samples[0].by_rank[first.rank].site.frames),
            subjects=tuple(names)[:_MOST_NAMES],
            grade=grade,
            confidence=confidence,
            evidence=tuple(map(_row, found)),
        )

    def _divided(self, view: GradientView, wrong: Sequence[ExpertGradients]) -> Finding:
        first, times = wrong[0], wrong[0].multiple()
        how = "as large as" if times > 0 else "smaller than"
        is_clear = not any(each.scales or each.are_tables for each in wrong)
        what = "tables" if all(each.are_tables for each in wrong) else "experts"
        return self._finding(
            view,
            f"the gradients of the {what} of {view.model} are {abs(times)} times {how} those "
            f"of dense parameters, for the same tokens: an all-to-all over {len(first.exchange)} "
            f"ranks brings the tokens together, dense gradients are divided by "
            f"{_number(first.dense.divisor)}, those of {what} by {_number(_total(first))}",
            grade=Grade.LIKELY if is_clear else Grade.NOTE,
            confidence=0.9 if is_clear else 0.5,
            found=wrong,
        )

    def _mixed(self, view: GradientView, mixed: Sequence[ExpertGradients]) -> Finding:
        first = mixed[0]
        finding = self._finding(
            view,
            f"gradients of different experts of {view.model} are added up: ranks "
            f"{RankSet(first.experts.members)} hold different experts under the same names, and "
            f"their gradients are combined over all of these ranks",
            grade=Grade.LIKELY,
            confidence=0.85,
            found=mixed,
        )
        return msgspec.structs.replace(
            finding,
            why="Each rank of an all-to-all holds experts of its own, so no other rank has a part "
            "of their gradients.",
            fix="Combine the gradients of experts over the ranks that hold the same experts only.",
            fix_changes="The gradients of all experts.",
        )


def _row(each: ExpertGradients) -> Evidence:
    return Evidence(
        ranks=RankSet([each.rank]),
        summary=f"dense: sum over ranks {RankSet(each.dense.members)} / "
        f"{_number(each.dense.divisor)}; experts: tokens of ranks {RankSet(each.exchange)}, sum "
        f"over ranks {RankSet(each.experts.members)} / {_number(each.experts.divisor)}, times "
        f"{_number(each.factor)} in the backward pass of the all-to-all",
        values={"excess": each.excess, "factor": each.factor},
    )


def _total(each: ExpertGradients) -> float:
    return each.experts.divisor / each.factor


def _number(value: float) -> str:
    return f"{value:.4g}"
