"""SEQ002: tokens come out of a gather in another order than they went into the split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import faults_of, parts_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import TokenTraceView

_KINDS: Final = frozenset(
    {
        FaultKind.PERMUTED,
        FaultKind.OTHER_PART,
        FaultKind.MIXED,
        FaultKind.FOREIGN,
        FaultKind.WRONG_DIM,
    }
)


class WrongTokenOrder(Check[TokenTraceView]):
    """Tokens come out of a gather in another order than they went into the split.

    ## What it detects
    Numbered tokens that stand at other places after the program's own split and gather: parts
    in the order of other ranks, a head-tail order that is not undone, channels of several
    tokens mixed, a cut along another dimension, values that belong to no token.

    ## Why it matters
    Labels, masks and positions then belong to other tokens than the activations beside them:
    the loss is wrong and still falls.

    ## Example
    `dist.all_gather(parts, x)` followed by `torch.cat(parts, dim=1)` after a split in head-tail
    order.

    ## How to fix
    Let the gather undo what the split does: the same dimension, the same order of ranks, the
    same order within a part.

    ## References
    - `torch.distributed.all_gather_into_tensor`
    - `torch.distributed.tensor.experimental.context_parallel`
    """

    code = "SEQ002"
    name = "wrong-token-order"
    severity = Severity.ERROR

    why = "A gather that joins the parts otherwise than the split cut them returns the right shape."
    fix = (
        "Make the gather the inverse of the split: dimension, order of ranks, order within a part."
    )
    fix_changes = "Which token stands where, and so the loss."
    fix_leaves = "How gradients are multiplied, which is looked at only where the order is right."
    disproof = "Tokens that are numbered come out of the gather in ascending order."

    def check(self, alignment: TokenTraceView) -> Iterator[Finding]:
        """Judge what all ranks of a group saw of the same tokens."""
        for fault in faults_of(alignment.by_rank):
            if fault.kind in _KINDS:
                yield self.finding(**parts_of(fault, alignment.by_rank))
