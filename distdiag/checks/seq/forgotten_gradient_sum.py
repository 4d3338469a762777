"""SEQ012: gradients of a rank's own tokens are never summed over the ranks that hold copies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.gradients import GradientSum
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.experts import is_of_expert, routers_in
from distdiag.views.gradients import (
    TOLERANCE,
    GradientSample,
    GradientView,
    Ranks,
    Sum,
    SumsView,
    combined_on,
    divisors,
)

# First: the program sums gradients of most parameters over ranks, and leaves some out.
#
# A rank may train some parameters for itself: a head, its last layers, or all of one kind, such as
# norms. Where neither is the case, what is left out should be summed; so it should where the ranks
# divide one data set, since then there is one task only.

FEWEST_SUMS: Final = 3
FEWEST_SUMMED: Final = 3
_NUMBER: Final = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def summed_in(view: SumsView) -> tuple[str, ...]:
    """Return the parameters that are summed in all sampled steps, and whose copies stay equal.

    If most do not stay so, what is left out makes ranks clip the rest by norms of their own.
    """
    summed = tuple(_all_are(view, Sum.SUMMED, view.sums))
    equal = tuple(name for name in summed if name not in view.drifted)
    return equal if 2 * len(equal) >= len(summed) else summed


def forgotten_in(view: SumsView) -> tuple[str, ...]:
    """Return the parameters whose gradients are never summed although they should be."""
    plans = {name: plan for name, plan in view.plans.items() if not is_of_expert(plan)}
    summed = summed_in(view)
    own = set(_all_are(view, Sum.OWN, view.drifted & plans.keys()))
    is_regular = all(len(set(view.sums[name])) <= 1 for name in plans)
    most = len(summed) - 1 if view.is_one_task else len(summed) // 2
    is_minority = len(summed) >= FEWEST_SUMMED and len(own) <= most
    if view.has_shards or not is_regular or not is_minority:
        return ()
    left_out = {name for name in own if _is_left_out(view, name, summed)}
    routers = own & routers_in(tuple(view.plans.values()))
    if own == left_out | routers:
        return tuple(sorted(own))
    # Who trains gates and other parts for itself may have tasks of its own.
    others = set(_all_are(view, Sum.SUMMED, view.sums.keys() - own))
    is_all = own | others == plans.keys() and _have_owner(view, own, summed)
    return tuple(sorted(left_out or (own if is_all else ())))


def doubt_of(view: SumsView, names: Sequence[str]) -> str:
    """Say why these may be intended to be left out all the same."""
    if view.is_more_sent:
        return "more was sent between these ranks in a later step"
    has_own = any(is_of_expert(view.plans[name]) for name in view.drifted & view.plans.keys())
    if has_own and routers_in(tuple(view.plans.values())) >= set(names):
        return "each rank also trains experts for itself, which were equal at first"
    is_torn_out = all(_is_left_out(view, name, summed_in(view)) for name in names)
    routers = routers_in(tuple(view.plans.values()))
    if not view.is_one_task and not is_torn_out and not routers >= set(names):
        return "each rank may have a task of its own"
    return ""


def _have_owner(view: SumsView, own: Iterable[str], summed: Sequence[str]) -> bool:
    """Say whether the optimizer that holds them holds others that are summed."""
    owners = {view.plans[name].owners for name in summed}
    return all(view.plans[name].owners in owners for name in own)


def _all_are(view: SumsView, wanted: Sum, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names):
        sums = view.sums[name]
        if len(sums) >= FEWEST_SUMS and set(sums) == {wanted}:
            yield name


def _is_left_out(view: SumsView, name: str, summed: Sequence[str]) -> bool:
    """Say whether both others of its kind and others in each of its blocks are summed."""
    mine, kind = view.plans[name], _NUMBER.sub("#", name)
    beside = [other for other in summed if view.plans[other].owners == mine.owners]
    similar = [
        o for o in beside if _NUMBER.sub("#", o) == kind and view.plans[o].shape == mine.shape
    ]
    blocks = [name[: match.end() + 1] for match in _NUMBER.finditer(name)]
    return bool(similar) and all(any(o.startswith(block) for o in beside) for block in blocks)


# Second: parameters that work on parts of sequences, and whose gradients are never summed.
#
# Where parts are gathered, the backward pass of the gather gives back one part of a gradient; where
# they are scattered, it makes a whole of them. So the graph tells which parameters work on some of
# the tokens only, with copies on other ranks for the rest, and which work on all, as shards do.

FEWEST_SAMPLES: Final = 2
_EQUAL: Final = 1e-9
_APART: Final = 1e-3
_LAYER_NUMBER: Final = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True, slots=True)
class PartGradients:
    """Parameters that these ranks hold copies of and apply gradients of their own part to.

    `num_shards` other parameters, which work on all tokens, were read beside them.
    """

    ranks: Ranks
    names: tuple[str, ...]
    num_shards: int
    step: int


class _Tokens(Enum):
    """On which tokens of a group the parameters behind an autograd node work."""

    PART = auto()
    WHOLE = auto()
    UNKNOWN = auto()


_OTHER: Final = {_Tokens.PART: _Tokens.WHOLE, _Tokens.WHOLE: _Tokens.PART}


def part_gradients(view: GradientView) -> Iterator[PartGradients]:
    """Yield, for each group that gathers parts, equal copies that are never summed over it."""
    groups = {
        group for sample in view.samples for found in sample.gathers.values() for group in found
    }
    for group in sorted(group for group in groups if len(group) > 1):
        samples = [sample for sample in view.samples if set(group) <= sample.by_rank.keys()]
        if len(samples) < FEWEST_SAMPLES:
            continue
        regions = [_regions(samples[0], rank, group) for rank in group]
        parts, shards = (
            set.intersection(*(_named(each, tokens) for each in regions)) - view.placed
            for tokens in (_Tokens.PART, _Tokens.WHOLE)
        )
        names = [name for name in sorted(parts) if _are_copies(samples, group, name)]
        found = tuple(name for name in names if _are_own(samples, group, name, shards))
        if found:
            yield PartGradients(group, found, len(shards), samples[0].step)


# On which tokens a parameter works


def _regions(sample: GradientSample, rank: int, group: Ranks) -> dict[str, set[_Tokens]]:
    """Return on which tokens each parameter works, by each way on which gradients reach it."""
    found: dict[str, set[_Tokens]] = {}
    for place, node in enumerate(sample.by_rank[rank].nodes):
        if place and not _crosses(sample, rank, place):
            continue  # the ones above it show what lies behind it
        tokens = _behind(sample, rank, group, place)
        reach = _reach(sample, rank, place)
        beyond = {
            _behind(sample, rank, group, below)
            for each in reach
            for below in sample.by_rank[rank].nodes[each].below
            if below not in reach
        }
        if place == 0 and len(beyond) == 1:
            tokens = _OTHER.get(beyond.pop(), _Tokens.UNKNOWN)
        elif tokens in beyond or not node.is_bounded:
            tokens = _Tokens.UNKNOWN
        for name in (n for each in reach for n in sample.by_rank[rank].nodes[each].parameters):
            found.setdefault(name, set()).add(tokens)
    return found


def _named(regions: dict[str, set[_Tokens]], tokens: _Tokens) -> set[str]:
    return {name for name, found in regions.items() if found == {tokens}}


def _crosses(sample: GradientSample, rank: int, place: int) -> bool:
    return bool(sample.gathers[rank][place] or sample.exchanges[rank][place])


def _behind(sample: GradientSample, rank: int, group: Ranks, place: int) -> _Tokens:
    """Return on which tokens parameters behind a node work, where it gathers or scatters."""
    node = sample.by_rank[rank].nodes[place]
    given, passed = node.given.num_elements, node.passed.num_elements
    if sample.gathers[rank][place] != group or not given or not passed:
        return _Tokens.UNKNOWN
    if given == passed * len(group):
        return _Tokens.PART
    return _Tokens.WHOLE if passed == given * len(group) else _Tokens.UNKNOWN


def _reach(sample: GradientSample, rank: int, place: int) -> list[int]:
    """Return an autograd node and those behind it that send nothing to other ranks."""
    nodes = sample.by_rank[rank].nodes
    reach = [place]
    for each in reach:  # it grows meanwhile
        below = [b for b in nodes[each].below if not _crosses(sample, rank, b)]
        reach += [b for b in below if b not in reach]
    return reach


# What is done with its gradient


def _are_copies(samples: Sequence[GradientSample], group: Ranks, name: str) -> bool:
    """Say whether a parameter of a layer was the same at first and is not any more.

    Tables of positions, and others outside of layers, may be split as the sequence is.
    """
    first, last = (_on(sample, group, name) for sample in (samples[0], samples[-1]))
    is_plain = not any(each.is_table or each.members for each in first)
    if not _LAYER_NUMBER.search(name) or not first or not last or not is_plain:
        return False
    begun, ended = ([each.weight for each in found] for found in (first, last))
    most = max(map(abs, begun))
    is_equal = max(begun) - min(begun) <= _EQUAL * most
    return is_equal and max(ended) - min(ended) > _EQUAL * most


def _on(sample: GradientSample, group: Ranks, name: str) -> list[GradientSum]:
    found = [sample.named(rank).get(name) for rank in group]
    there = [each for each in found if each is not None]
    return there if len(there) == len(group) else []


def _are_own(samples: Sequence[GradientSample], group: Ranks, name: str, shards: set[str]) -> bool:
    """Say whether a gradient is treated as those of shards are, and differs between ranks."""
    found = [_is_own(sample, group, name, shards) for sample in samples]
    return found.count(True) >= FEWEST_SAMPLES and False not in found


def _is_own(sample: GradientSample, group: Ranks, name: str, shards: set[str]) -> bool | None:
    found = _on(sample, group, name)
    if not found or not all(each.norm > 0 for each in found):
        return None
    for rank, own in zip(group, found, strict=True):
        combined = combined_on([sample], rank, shards.__contains__)
        if combined is None or set(combined.members) & set(group) != {rank}:
            return None
        values = list(divisors(sample, rank, combined.members, [name]))
        if combined.members == (rank,) and own.found and not own.has_left:
            values = [own.given / own.found]
        if not values:
            return None
        if abs(values[0] - combined.divisor) > TOLERANCE * combined.divisor:
            return False
    applied = [each.found for each in found]
    return max(applied) - min(applied) > _APART * max(map(abs, applied))


class ForgottenGradientSum(Check[GradientView | SumsView]):
    """Gradients of a rank's own tokens are never summed over the ranks that hold copies.

    ## What you see
    The ranks continue with different models, and the checkpoint holds the model of one rank. Each
    copy of the parameter gets the gradient of one part of the tokens, and nothing sums these
    gradients over the ranks.

    ## Example
        loss.backward()
        # right: these two lines; wrong: without them
        for p in layer_norms_and_routers:
            dist.all_reduce(p.grad, group=sequence_group)
        optimizer.step()

    ## How to fix
    After the backward pass and before clipping and the step, all-reduce the gradients of these
    parameters over these ranks: `dist.all_reduce(p.grad, group=sequence_group)`.

    Changes: The gradient of every copy: it becomes the gradient of all tokens.

    Leaves: Copies that have already diverged in earlier steps.

    ## When it is not a defect
    Each rank is intended to train these parameters for itself.

    If so, add `ignore = ["SEQ012"]` to `distdiag.toml`. It is a note where more is sent in a later
    step, for routers whose experts are each rank's own, and for whole modules unless a sampler
    divides one data set among the ranks.

    ## References
    - https://github.com/NVIDIA/Megatron-LM/issues/656
    - https://github.com/bigcode-project/Megatron-LM/issues/37
    """

    code = "SEQ012"
    name = "forgotten-gradient-sum"
    severity = Severity.ERROR

    def check(self, view: GradientView | SumsView) -> Iterator[Finding]:
        """Judge the graph of the loss, or what the program sums."""
        yield from self._of_graph(view) if isinstance(view, GradientView) else self._of_sums(view)

    def _of_graph(self, view: GradientView) -> Iterator[Finding]:
        """Look for parameters that work on parts of sequences."""
        for found in part_gradients(view):
            ranks = RankSet(found.ranks)
            yield self.finding(
                f"the gradient of {first_and_more(found.names)} of {view.model} covers each rank's "
                f"own part of the sequences only, and is not summed over {ranks.phrase()}, "
                "which hold copies of the parameter: one sum before each step was expected",
                ranks=ranks,
                step=found.step,
                location=user_location(view.samples[0].by_rank[found.ranks[0]].site.frames),
                subjects=found.names,
                grade=Grade.LIKELY,
                confidence=0.9,
                evidence=(self._given(view, found), *_applied(view, found)),
            )

    def _given(self, view: GradientView, found: PartGradients) -> Evidence:
        return Evidence(
            ranks=RankSet(found.ranks),
            summary=f"{len(found.names)} parameters work on parts of sequences that are gathered "
            f"over these ranks for {found.num_shards} others; all of them were equal at first and "
            f"different before step {view.samples[-1].step}",
        )

    def _of_sums(self, view: SumsView) -> Iterator[Finding]:
        """Look for parameters that a program leaves out of its sums."""
        names, summed = forgotten_in(view), summed_in(view)
        if not names:
            return
        ranks = RankSet(view.ranks)
        doubt = doubt_of(view, names)
        but = f"; but {doubt}" if doubt else ""
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} is not summed over "
            f"{ranks.phrase()}, which hold copies of it, while those of {len(summed)} other "
            f"parameters are: one sum before each step was expected{but}",
            ranks=ranks,
            step=view.step,
            location=user_location(view.site.frames),
            subjects=names,
            severity=Severity.WARNING,
            grade=Grade.NOTE if doubt else Grade.LIKELY,
            confidence=0.4 if doubt else 0.85,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"{len(names)} parameters were equal at first, had different "
                    f"gradients at {len(view.sums[names[0]])} steps and differ since then; the "
                    f"gradients of {', '.join(summed[:3])} and others are summed",
                ),
            ),
        )


def _applied(view: GradientView, found: PartGradients) -> Iterator[Evidence]:
    for rank in found.ranks:
        own = view.samples[0].named(rank)[found.names[0]]
        yield Evidence(
            ranks=RankSet([rank]),
            summary=f"{own.name}: the backward pass gave a gradient whose weighted sum is "
            f"{own.given:.4g}, the optimizer found {own.found:.4g}",
        )
