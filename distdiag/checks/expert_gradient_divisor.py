"""MOE012: the gradients of experts are divided by another number than those of dense parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from distdiag.checks.base import Check
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.gradient_event import GradientSums
from distdiag.gradient_view import GradientView
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.expert_gradients import (
    Coverage,
    ExpertGradients,
    coverage,
    expert_gradients,
)

_MOST_NAMES: Final = 8


class ExpertGradientDivisor(Check):
    """The gradients of experts are divided by another number than those of dense parameters.

    ## What it detects
    In the first steps, the sum of the gradients that the backward passes of all ranks gave, divided
    by what the optimizer finds, is measured for dense parameters and for experts; so is the factor
    of the all-to-all's backward pass. Experts get the tokens of all ranks of the exchange. Counted
    by token, their gradients are a whole number of times as large as those of dense parameters.
    Nothing is assumed of who divides: hooks, the exchange, a wrapper or the program itself. Tables
    of embeddings that are spread over the ranks often have a rate of their own: then it is a note.

    ## Why it matters
    Experts train at a multiple of the learning rate. Adam hides it in the loss; the gradient norm,
    clipping and weight decay are wrong, and change with the number of ranks.

    ## Example
    DDP or FSDP averages dense gradients over all ranks, and those of experts over the ranks that
    hold the same experts only, although each has summed up the tokens of its exchange already.

    ## How to fix
    Divide the gradients of experts by the number of ranks that dense gradients are averaged over:
    `set_gradient_divide_factor` of FSDP2, or a division before the step.

    ## References
    - pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956
    """

    code = "MOE012"
    name = "expert-gradient-divisor"
    severity = Severity.WARNING
    needs = (GradientSums,)

    why = "An exchange brings the tokens of several ranks, so their gradients are summed already."
    fix = "Divide expert gradients by as many ranks as dense ones, whoever holds the experts."
    fix_changes = "The step size of the experts, the gradient norm and what is clipped."
    fix_leaves = "The gradients of all dense parameters."
    disproof = "Experts are meant to train at another rate, by this factor."

    def check_gradients(self, view: GradientView) -> Iterator[Finding]:
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

    def _told(
        self,
        view: GradientView,
        message: str,
        found: Sequence[ExpertGradients],
        grade: Grade,
        confidence: float,
        **texts: Any,  # noqa: ANN401
    ) -> Finding:
        first = found[0]
        names = dict.fromkeys(name for each in found for name in each.names)
        return self.finding(
            message,
            ranks=RankSet(each.rank for each in found),
            step=first.step,
            location=user_location(view.looks[0].by_rank[first.rank].site.frames),
            subjects=tuple(names)[:_MOST_NAMES],
            grade=grade,
            confidence=confidence,
            evidence=tuple(map(_row, found)),
            **texts,
        )

    def _divided(self, view: GradientView, wrong: Sequence[ExpertGradients]) -> Finding:
        first, times = wrong[0], wrong[0].multiple()
        how = "as large as" if times > 0 else "smaller than"
        is_clear = not any(each.scales or each.are_tables for each in wrong)
        what = "tables" if all(each.are_tables for each in wrong) else "experts"
        return self._told(
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
        return self._told(
            view,
            f"gradients of different experts of {view.model} are added up: ranks "
            f"{RankSet(first.experts.members)} hold different experts under the same names, and "
            f"their gradients are combined over all of these ranks",
            grade=Grade.LIKELY,
            confidence=0.85,
            why="Each rank of an exchange holds experts of its own, so no other rank has a part "
            "of their gradients.",
            fix="Combine the gradients of experts over the ranks that hold the same experts only.",
            fix_changes="The gradients of all experts.",
            found=mixed,
        )


def _row(each: ExpertGradients) -> Evidence:
    return Evidence(
        ranks=RankSet([each.rank]),
        summary=f"dense: sum over ranks {RankSet(each.dense.members)} / "
        f"{_number(each.dense.divisor)}; experts: tokens of ranks {RankSet(each.exchange)}, sum "
        f"over ranks {RankSet(each.experts.members)} / {_number(each.experts.divisor)}, times "
        f"{_number(each.factor)} in the backward pass of the exchange",
        values={"excess": each.excess, "factor": each.factor},
    )


def _total(each: ExpertGradients) -> float:
    return each.experts.divisor / each.factor


def _number(value: float) -> str:
    return f"{value:.4g}"
