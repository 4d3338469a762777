"""DAT007: ranks that train together have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import place_of, sampler_phrase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import EpochView


class UnevenBatches(Check[EpochView]):
    """Ranks that train together have different numbers of batches.

    ## What it detects
    A pass over the training data that has come to its end on all ranks of one model, after
    different numbers of batches.

    ## Why it matters
    Each batch that only some ranks have is a step in which they wait for the others: it hangs, or
    it meets a step of the next epoch.

    ## Example
    A data set that was divided by hand into parts of unequal length; a filter that drops samples.

    ## How to fix
    Make the parts equally long, or use the `Join` context manager.

    ## References
    - `torch.distributed.algorithms.join.Join`
    """

    code = "DAT007"
    name = "uneven-batches"
    severity = Severity.WARNING

    why = "Whoever has more batches calls collectives that the others do not."
    fix = "Make the parts equally long, or wrap the loop in model.join() or Join."
    fix_changes = "How many samples an epoch has."
    fix_leaves = "The gradients of the steps that all ranks take."
    disproof = "The loop ends on all ranks in the same step, or Join takes care of the rest."

    def check(self, alignment: EpochView) -> Iterator[Finding]:
        """Compare how many batches the ranks had."""
        passes = alignment.by_rank
        if alignment.kind != "data" or not all(one.is_complete for one in passes.values()):
            return
        counts = {one.num_batches for one in passes.values()}
        if len(counts) < 2 or not all(one.is_training and one.members for one in passes.values()):
            return
        few = RankSet(rank for rank, one in passes.items() if one.num_batches == min(counts))
        first = passes[min(few)]
        # Whether that harms anybody is seen by the collectives.
        yield self.finding(
            f"pass {first.number + 1} over {first.dataset} has {min(counts)} batches on "
            f"{few.phrase()} and up to {max(counts)} on others",
            ranks=few,
            step=first.step,
            location=place_of(passes),
            subjects=(first.stream,),
            grade=Grade.NOTE,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{one.num_batches} batches of {one.num_indices} samples from "
                    f"{sampler_phrase(one.sampler)}",
                )
                for rank, one in passes.items()
            ),
        )
