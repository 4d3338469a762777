"""SHD021: a step applies a sum to which some passes or ranks contribute otherwise than others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.contributions import FEWEST, LEFT, Contribution, ContributionView

FEWEST_STEPS: Final = 2
"""What a single step shows may be its own, such as a batch that was skipped."""


@dataclass(frozen=True, slots=True)
class MixedPasses:
    """Which passes are summed over ranks, and which are applied by the rank alone that ran them."""

    summed: tuple[int, ...]
    own: tuple[int, ...]


def mixed_passes(found: Contribution) -> MixedPasses | None:
    """Return how the passes of a step were treated if some were summed and others were not."""
    summed: list[int] = []
    own: list[int] = []
    for number in range(found.num_passes):
        sources = [s for s in found.vector if s.number == number and not s.is_earlier]
        others = [each for each in sources if not set(each.ranks) & set(found.ranks)]
        mine = [each for each in sources if each not in others]
        if not others or not mine or all(map(found.is_nothing, mine)):
            continue
        are_used = {not found.is_nothing(each) for each in others}
        if len(are_used) == 1:
            (summed if are_used.pop() else own).append(number)
    return MixedPasses(tuple(summed), tuple(own)) if summed and own else None


@dataclass(frozen=True, slots=True)
class LatePasses:
    """Which passes a step applies, and which ones only the step after it."""

    applied: tuple[int, ...]
    late: tuple[int, ...]


def late_passes(found: Contribution) -> LatePasses | None:
    """Return how a step splits up its passes if it applies some of the step before instead."""
    used = {source for source in found.vector if not found.is_nothing(source)}
    late = {source.number for source in used if source.is_earlier}
    applied = {source.number for source in used if not source.is_earlier} - {LEFT}
    is_split = late and applied and not late & applied
    return LatePasses(tuple(sorted(applied)), tuple(sorted(late))) if is_split else None


def missing_ranks(found: Contribution) -> tuple[int, ...]:
    """Return the ranks that apply a sum to which they gave nothing, though they had a gradient."""
    used = {r for s in found.vector if not found.is_nothing(s) for r in s.ranks}
    given = {r for s in found.vector if s.number != LEFT for r in s.ranks}
    if not used or (found.is_sharded and len(used) == 1):
        return ()  # nothing was reduced at all
    return tuple(sorted((given & set(found.ranks)) - used))


class PartlyReducedGradient(Check[ContributionView]):
    """A step applies gradients of which only a part is summed over the ranks.

    ## What you see
    Each rank adds passes of its own to the sum of all ranks, or a rank's work is thrown away. The
    copies drift apart, or a part of each batch is not trained on; the loss looks plausible.

    ## Example
        for number, batch in enumerate(batches):
            # wrong: the first pass is reduced, those up to the step are not
            is_last = number % accumulation == 0
            # right
            is_last = (number + 1) % accumulation == 0
            with nullcontext() if is_last else model.no_sync():
                loss_of(model, batch).backward()
            if (number + 1) % accumulation == 0:
                optimizer.step()

    ## How to fix
    Let the last backward pass before the step reduce, and not an earlier one: leave `no_sync()` (or
    set `require_backward_grad_sync = True`) for that pass, before its forward pass, in which DDP
    decides. It takes along what the passes before it have accumulated.

    Changes: The gradient of every copy: it becomes the mean over all passes of all ranks.

    Leaves: The copies that differ already since earlier steps.

    ## When it is not a defect
    Each rank is intended to add something of its own to a gradient that they share.

    If so, add `ignore = ["SHD021"]` to `distdiag.toml`. Steps whose passes are all each rank's
    own, as those of local SGD, are not meant here.

    ## References
    - https://github.com/modelscope/FunASR/issues/3472
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    code = "SHD021"
    name = "partly-reduced-gradient"
    severity = Severity.ERROR

    def check(self, view: ContributionView) -> Iterator[Finding]:
        """Judge what all sampled steps show alike."""
        mixed = [(each, mixed_passes(each)) for each in view.found]
        shown = [(each, passes) for each, passes in mixed if passes is not None]
        if len({each.step for each, _ in shown}) >= FEWEST_STEPS:
            yield from self._mixed(view, shown)
        late = [(each, passes) for each in view.found if (passes := late_passes(each))]
        if len({each.step for each, _ in late}) >= FEWEST_STEPS:
            yield self._late(view, late)
        lacking = [each for each in view.found if missing_ranks(each)]
        steps = {each.step for each in lacking}
        if len(steps) >= FEWEST_STEPS and steps == {each.step for each in view.found}:
            yield self._missing(view, lacking)

    def _mixed(
        self, view: ContributionView, shown: Sequence[tuple[Contribution, MixedPasses]]
    ) -> Iterator[Finding]:
        first, passes = shown[0]
        names = [name for name in first.names if name in view.copies]
        if len(names) < FEWEST:
            return
        ranks = RankSet(rank for each, _ in shown for rank in each.ranks)
        yield self.finding(
            f"the gradient of {first_and_more(names)} of {view.model} that step {first.step} "
            f"applies is only partly reduced over {RankSet(first.holders).phrase()}: it was "
            f"reduced in {_passes(passes.summed, first)}, and {_passes(passes.own, first)} added "
            f"each rank's own",
            ranks=ranks,
            step=first.step,
            location=user_location(view.site.frames),
            subjects=tuple(names),
            evidence=tuple(
                Evidence(ranks=RankSet(each.ranks), summary=in_words(each))
                for each, _ in shown
                if each.step == first.step
            ),
        )

    def _late(
        self, view: ContributionView, late: Sequence[tuple[Contribution, LatePasses]]
    ) -> Finding:
        first, passes = late[0]
        ranks = RankSet(rank for each, _ in late for rank in each.ranks)
        return self.finding(
            f"the gradient of {first_and_more(first.names)} of {view.model} that step {first.step} "
            f"applies is only partly reduced over {RankSet(first.holders).phrase()}: it holds "
            f"{_passes(passes.applied, first)}, but {_passes(passes.late, first)} comes a step "
            "late",
            ranks=ranks,
            step=first.step,
            location=user_location(view.site.frames),
            subjects=first.names,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(ranks=RankSet(each.ranks), summary=in_words(each)) for each, _ in late[:2]
            ),
            why="Some passes are left unreduced when the optimizer steps, and are added to the "
            "gradient of the next step, whose weights are others.",
            fix="Let the last backward pass before each step reduce: call "
            "`set_requires_gradient_sync(True)`, or leave `no_sync`, for that one.",
        )

    def _missing(self, view: ContributionView, lacking: Sequence[Contribution]) -> Finding:
        first = lacking[0]
        missing = RankSet(rank for each in lacking for rank in missing_ranks(each))
        return self.finding(
            f"the gradient of {first_and_more(first.names)} of {view.model} that "
            f"{RankSet(first.ranks).phrase()} apply at step {first.step} lacks the part of "
            f"{missing.phrase()}",
            ranks=missing,
            step=first.step,
            location=user_location(view.site.frames),
            subjects=first.names,
            severity=Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(ranks=RankSet(each.ranks), summary=in_words(each)) for each in lacking[:2]
            ),
            fix="Reduce the gradients over all ranks that ran a backward pass for this step.",
            fix_changes="The gradient: the batches of all ranks count.",
        )


_MOST_TOLD_APART: Final = 8
_FIRST: Final = 4


def _passes(numbers: Sequence[int], found: Contribution) -> str:
    """Name passes by their numbers from 1 on; those between many are one."""
    if found.num_passes >= _MOST_TOLD_APART:
        return "the first backward passes" if min(numbers) < _FIRST else "later ones"
    listed = RankSet(number + 1 for number in numbers)
    word = "pass" if len(numbers) == 1 else "passes"
    return f"backward {word} {listed} of {found.num_passes}"


def in_words(found: Contribution) -> str:
    """Say what is applied, as a sum of what was given."""
    by_value: dict[str, list[str]] = {}
    for source, value in found.vector.items():
        if found.is_nothing(source):
            continue
        whose = RankSet(source.ranks).phrase()
        if source.number == LEFT:
            whose = "the gradient that was there before"
        elif source.number >= 0 and found.num_passes > 1:
            whose += f" in pass {source.number + 1}"
        whose += " of the step before" if source.is_earlier else ""
        by_value.setdefault(f"{value:.3g}", []).append(whose)
    parts = [f"{value} x ({' + '.join(whose)})" for value, whose in by_value.items()]
    words = f"step {found.step} applies {' + '.join(parts)}, measured on {len(found.names)} tensors"
    more = len(set(found.kept) - set(found.names))
    return words + (f"; of {more} others the gradient that was there before, too" if more else "")
