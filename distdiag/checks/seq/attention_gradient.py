"""SEQ009: split attention computes the right output and a wrong gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind
from distdiag.checks.seq.token_trace import faults_of, parts_of
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import TokenTraceView

_KINDS: Final = frozenset({FaultKind.ATTENTION_GRADIENT})


class AttentionGradient(Check[TokenTraceView]):
    """Split attention computes the right output and a wrong gradient.

    ## What it detects
    Random queries, keys and values go through the program's own split, attention and gather. Where
    the output is that of plain softmax attention over whole rows, the gradients of the three have
    to be so too. Attention of another kind (windows, biases by position, other scales) is not
    judged.

    ## Why it matters
    The loss is right in every step, and the model learns from something else.

    ## Example
    A backward pass of ring attention that uses the keys and values saved in the first step again,
    instead of those that come round.

    ## How to fix
    Compare each step of the hand-written backward pass with that of the forward pass: the same
    chunk, the same mask, the sum of what all steps give, sent back to the rank that holds it.

    ## References
    - huggingface/diffusers#14265
    """

    code = "SEQ009"
    name = "attention-gradient"
    severity = Severity.ERROR

    why = "The backward pass of split attention is written by hand, and no error shows in the loss."
    fix = "Use in each step of the backward pass the chunk that the forward pass used."
    fix_changes = "The gradients of the projections before attention, and of all that is below."
    fix_leaves = "Weights that were trained with the wrong gradients."
    disproof = "Gradients agree with those of full attention over the gathered rows."

    def check(self, alignment: TokenTraceView) -> Iterator[Finding]:
        """Judge what all ranks of a group saw of the same tokens."""
        for fault in faults_of(alignment.by_rank):
            if fault.kind in _KINDS:
                yield self.finding(**parts_of(fault, alignment.by_rank))
