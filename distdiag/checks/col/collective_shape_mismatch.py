"""COL003: ranks call one collective with sizes that do not fit together."""

from collections.abc import Iterator
from typing import Final

import msgspec

from distdiag.checks.col.mismatch import CallMismatch, each_group
from distdiag.checks.shared.culprits import (
    Reason,
    Verdict,
    blame,
    group_by,
    group_evidence,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import (
    condition_between,
    groups_by_place,
    under,
    unexplained,
)
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase, sizes_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import (
    Aspect,
    clean_module,
    contradiction,
    payload,
    ranks_in,
    uneven_transfers,
    wants_equal_sizes,
)

_WHY_OTHER_CALLS: Final = (
    "A condition was decided differently, so the ranks are at different calls, which have the same "
    "number only because one rank left out a call that the other makes."
)


class CollectiveShapeMismatch(CallMismatch):
    """Ranks call one collective with sizes that do not fit together.

    ## What you see
    With NCCL the call hangs, or reads and writes beyond the tensor; Gloo aborts the process. The
    ranks pass sizes that do not fit together, and NCCL does not compare them.

    ## Example
        # wrong: each rank pads to its own longest sample
        logits = model(pad(batch))
        dist.all_gather_into_tensor(everything, logits)

        # right: all ranks pad to the longest sample of all
        longest = torch.tensor(max_length(batch))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(everything, model(pad(batch, int(longest))))

    ## How to fix
    Make the sizes equal on all ranks: pad to the maximum over the ranks, or drop the uneven last
    batch (`drop_last=True`). Or exchange the sizes first and pass splits that fit
    (`dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)`).

    Changes: Padding must be masked out wherever the gathered values are used.

    Leaves: The reason why the ranks' data differ in size.

    ## When it is not a defect
    The sizes fit for every pair of ranks, as in an all_to_all with matching splits.

    Equal numbers of elements in different shapes are only a note.

    Equal numbers of elements in different shapes are only a note. To silence it, set
    `ignore = ["COL003"]` in `distdiag.toml`.

    ## References
    - https://github.com/huggingface/accelerate/issues/3921
    - https://github.com/deepspeedai/DeepSpeed/issues/6809
    - https://github.com/huggingface/trl/issues/2890
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_gather
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single
    """

    code = "COL003"
    name = "collective-shape-mismatch"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Compare numbers of elements; a mere difference in shape is a note."""
        if unexplained(alignment) is Aspect.SHAPE:
            found = self._differing_sizes(alignment)
            condition = condition_between(alignment)
            yield (
                found if condition is None else under(_of_other_calls(found, alignment), condition)
            )
        elif alignment.kind == "collective" and contradiction(alignment) is None:
            groups = group_by(alignment, lambda call: call.signature.input_sizes)
            if len(groups) > 1 and wants_equal_sizes(alignment.any_event.signature.op):
                yield self._differing_shapes(alignment, groups)

    def _differing_sizes(self, alignment: CollectiveView) -> Finding:
        transfers = uneven_transfers(alignment.by_rank)
        groups = group_by(alignment, _sizes_of)
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
            verdict = blame(alignment, groups)
            detail = "all ranks must pass the same number of elements, but there are " + each_group(
                alignment, groups, lambda call: sum(payload(call.signature))
            )
        modules = {clean_module(call.site.module) for call in alignment.by_rank.values()}
        return self.mismatch(
            alignment,
            groups,
            f"{call_phrase(alignment.any_event)} has sizes that do not fit: {detail}",
            sizes_phrase,
            verdict,
            tuple(sorted(module for module in modules if module)),
        )

    def _differing_shapes(self, alignment: CollectiveView, groups: tuple[RankSet, ...]) -> Finding:
        culprits = blame(alignment, groups).culprits
        return self.finding(
            f"{call_phrase(alignment.any_event)} has the same number of elements in different "
            "shapes",
            ranks=culprits,
            step=step_of(alignment, culprits),
            location=location_in(alignment, culprits),
            grade=Grade.NOTE,
            confidence=0.3,
            evidence=group_evidence(alignment, groups, sizes_phrase),
        )


def _of_other_calls(finding: Finding, alignment: CollectiveView) -> Finding:
    """Say that the ranks did not mean the same call."""
    lines = ", ".join(
        f"{ranks.phrase()}{at(call_location(alignment.by_rank[min(ranks)]))}"
        for ranks in groups_by_place(alignment)
    )
    message = f"{finding.message}; these are different calls: {lines}"
    return msgspec.structs.replace(finding, message=message, why=_WHY_OTHER_CALLS)


def _sizes_of(call: Collective) -> tuple[object, ...]:
    s = call.signature
    return (s.input_sizes, s.output_sizes, s.input_splits, s.output_splits)
