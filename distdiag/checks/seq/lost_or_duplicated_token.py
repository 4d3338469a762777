"""SEQ001: tokens are lost or doubled where a sequence is split over ranks and gathered again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import faults_of, parts_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import TokenTraceView

_KINDS: Final = frozenset(
    {FaultKind.RAISED, FaultKind.LOST, FaultKind.DUPLICATED, FaultKind.PADDED}
)


class LostOrDuplicatedToken(Check[TokenTraceView]):
    """Tokens are lost or doubled where a sequence is split over ranks and gathered again.

    ## What it detects
    Numbered tokens that went through the program's own split and gather once
    (`--verify-sequence`, or `distdiag.sequence.verify`): those that came to no rank or to
    several, that are missing from the gathered sequence or twice in it, and padding that stays
    in it. A function that raised is a note, or a warning if only some ranks raised.

    ## Why it matters
    Every lost token is missing from the loss, and every doubled one counts twice; nothing
    fails.

    ## Example
    `x[:, rank * size : (rank + 1) * size + 1]`: the last token of each part is the first of the
    next.

    ## How to fix
    Let the parts of all ranks cover the sequence exactly; pad what cannot be divided before the
    split, and cut the padding off after the gather.

    ## References
    - `torch.chunk`
    - `torch.tensor_split`
    """

    code = "SEQ001"
    name = "lost-or-duplicated-token"
    severity = Severity.ERROR

    why = "Parts that overlap or leave gaps do not raise: shapes fit all the same."
    fix = "Let the parts cover the sequence exactly, with padding that the gather cuts off."
    fix_changes = "The tokens that each rank computes on, and so the loss."
    fix_leaves = "The order of the tokens, which is looked at on its own."
    disproof = "Tokens that are numbered come out of the gather exactly once each."

    def check(self, alignment: TokenTraceView) -> Iterator[Finding]:
        """Judge what all ranks of a group saw of the same tokens."""
        for fault in faults_of(alignment.by_rank):
            if fault.kind in _KINDS:
                yield self.finding(**parts_of(fault, alignment.by_rank))
