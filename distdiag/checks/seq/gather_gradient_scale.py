"""SEQ003: gradients come back through split and gather with a wrong factor, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import faults_of, parts_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import TokenTraceView

_KINDS: Final = frozenset({FaultKind.GRADIENT})


class GatherGradientScale(Check[TokenTraceView]):
    """Gradients come back through split and gather multiplied by a wrong factor, or not at all.

    ## What it detects
    The gradient of numbered tokens after the way back through the program's own split,
    attention and gather: tokens that get none, that get another factor than the others, and a
    common factor that does not fit what `reduction` says of the program. Where that is not
    told, a common factor is a note. It is looked at where all tokens came through rightly.

    ## Why it matters
    The loss is right and the gradients are those of another learning rate, or lack what other
    ranks have computed; parameters behind the split learn otherwise than those before it.

    ## Example
    A gather whose backward pass sums over the ranks, each of which has the same loss, in front
    of an average over data-parallel ranks only: gradients are as many times as large as there
    are ranks.

    ## How to fix
    Choose one convention: the backward pass of the gather takes its own part and parameters'
    gradients are summed over the ranks, or it sums and they are averaged.

    ## References
    - `torch.distributed.nn.functional.all_gather`
    - `torch.distributed._functional_collectives`
    """

    code = "SEQ003"
    name = "gather-gradient-scale"
    severity = Severity.ERROR

    why = "The backward passes must fit the reduction of parameters' gradients."
    fix = "Scale in the backward pass of the gather or change the reduction, not both."
    fix_changes = (
        "The size of the gradients before the split, and so clipping and the best learning rate."
    )
    fix_leaves = "Losses that are divided by wrong counts of tokens."
    disproof = "The gradient of each token on these ranks is the one that a single rank computes."

    def check(self, alignment: TokenTraceView) -> Iterator[Finding]:
        """Judge what all ranks of a group saw of the same tokens."""
        for fault in faults_of(alignment.by_rank):
            if fault.kind in _KINDS:
                yield self.finding(**parts_of(fault, alignment.by_rank))
