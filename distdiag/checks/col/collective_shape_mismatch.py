"""COL003: ranks call one collective with sizes that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    Reason,
    Verdict,
    blame,
    camp_evidence,
    grade_of,
    group_by,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import unexplained
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import Alignment, CollectiveView
from distdiag.views.invariants import (
    Aspect,
    clean_module,
    contradiction,
    payload,
    ranks_in,
    uneven_transfers,
    wants_equal_sizes,
)


class CollectiveShapeMismatch(Check[CollectiveView]):
    """Ranks call one collective with sizes that do not fit together.

    ## What it detects
    The same collective of a process group in which the numbers of elements contradict each other:
    unequal tensors where all must be equal (`all_reduce`, `broadcast`, `all_gather_into_tensor` …),
    or a list entry or split that has no room for what the peer sends (`all_gather`, `all_to_all`,
    `gather`, `scatter` …). Uneven sizes that fit are legal and stay silent. The same applies to a
    send and its receive. Equal numbers of elements in different shapes are a note.

    ## Why it matters
    NCCL does not compare sizes: the call hangs, or reads and writes memory beyond the tensor. Gloo
    aborts the process.

    ## Example
    Batches are padded to their own longest sample, and the logits are gathered for a metric: the
    sequence length differs from rank to rank.

    ## How to fix
    Pad to one length over all ranks before gathering, exchange the sizes first, or reduce a few
    numbers (correct, total) instead of gathering tensors.

    ## References
    - `torch.distributed.all_gather`, `torch.distributed.all_to_all_single`: sizes and splits
    - `torch.distributed.flight_recorder`: `SIZE_OR_SYNTAX_MISMATCH`
    """

    code = "COL003"
    name = "collective-shape-mismatch"
    severity = Severity.ERROR

    why = (
        "The backend trusts every rank's own sizes; where they differ it waits or overruns memory."
    )
    fix = (
        "Make the sizes equal: pad to the maximum over the ranks, drop the uneven last batch on "
        "all of them, or exchange the sizes first and pass splits that fit."
    )
    fix_changes = "Padding has to be masked out wherever the gathered values are used."
    fix_leaves = "The reason why the ranks' data differ in size."
    disproof = "The recorded sizes of this call fit together for every pair of ranks."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Compare numbers of elements; a mere difference in shape is a note."""
        if alignment.kind != "group" and unexplained(alignment) is Aspect.SHAPE:
            yield self._sizes(alignment)
        elif alignment.kind == "collective" and contradiction(alignment) is None:
            camps = group_by(alignment, lambda call: call.signature.input_sizes)
            if len(camps) > 1 and wants_equal_sizes(alignment.any_event.signature.op):
                yield self._shapes(alignment, camps)

    def _sizes(self, alignment: Alignment[Collective]) -> Finding:
        transfers = uneven_transfers(alignment.by_rank)
        camps = group_by(alignment, _sizes_of)
        if transfers:
            odd = ranks_in(transfers)
            others = RankSet(alignment.present_ranks - odd)
            reason = Reason.MAJORITY if len(odd) < len(others) else Reason.UNDECIDED
            verdict = Verdict(odd, others, reason)
            t = transfers[0]
            detail = (
                f"rank {t.source} sends {t.sent} elements to rank {t.target}, "
                f"which expects {t.expected}"
            )
        else:
            verdict = blame(alignment, camps)
            detail = "all must pass equally many elements, and there are " + ", ".join(
                f"{sum(payload(alignment.by_rank[min(camp)].signature))} on {camp.phrase()}"
                for camp in camps
            )
        modules = {clean_module(call.site.module) for call in alignment.by_rank.values()}
        return self.finding(
            f"{call_phrase(alignment.any_event)} has sizes that do not fit: {detail}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            subjects=tuple(sorted(module for module in modules if module)),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(alignment, camps, sizes_phrase),
        )

    def _shapes(self, alignment: Alignment[Collective], camps: tuple[RankSet, ...]) -> Finding:
        verdict = blame(alignment, camps)
        return self.finding(
            f"{call_phrase(alignment.any_event)} has equally many elements in different shapes",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            grade=Grade.NOTE,
            confidence=0.3,
            evidence=camp_evidence(alignment, camps, sizes_phrase),
        )


def _sizes_of(call: Collective) -> tuple[object, ...]:
    s = call.signature
    return (s.input_sizes, s.output_sizes, s.input_splits, s.output_splits)
