"""SEQ004: a token attends to other tokens than it should when the sequence is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import faults_of, parts_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import TokenTraceView

_KINDS: Final = frozenset({FaultKind.CONTEXT})


class AttentionContext(Check[TokenTraceView]):
    """A token attends to other tokens than it should when the sequence is split over ranks.

    ## What it detects
    The program's own attention over parts of a sequence, asked with queries and keys of zeros,
    so that each value shows over which tokens it was averaged: tokens left out, tokens of the
    future or of another document, tokens that count several times, padding, heads of other
    ranks.

    ## Why it matters
    The model is trained on contexts that it will not have: it looks ahead, mixes documents, or
    does not see what other ranks hold. The loss may even be lower.

    ## Example
    Ring attention that gets no cumulative lengths of packed rows: documents attend to one
    another.

    ## How to fix
    Pass the mask, the lengths of the documents and the positions of the whole sequence to the
    attention of each part, cut as the tokens are.

    ## References
    - `torch.nn.functional.scaled_dot_product_attention`
    - `torch.nn.attention.varlen`
    """

    code = "SEQ004"
    name = "attention-context"
    severity = Severity.ERROR

    why = (
        "Each rank computes the attention of its own part, and has to be told where that part lies."
    )
    fix = (
        "Give every rank the mask and the boundaries of the whole sequence, cut as the tokens are."
    )
    fix_changes = "What each token attends to, and so all activations behind the attention."
    fix_leaves = "The order of the tokens and the gradients, which are looked at on their own."
    disproof = "The values of numbered tokens show exactly the context that is due."

    def check(self, alignment: TokenTraceView) -> Iterator[Finding]:
        """Judge what all ranks of a group saw of the same tokens."""
        for fault in faults_of(alignment.by_rank):
            if fault.kind in _KINDS:
                yield self.finding(**parts_of(fault, alignment.by_rank))
