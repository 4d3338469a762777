"""DAT002: ranks that train one model together are given the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import ModelFed
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import FeedView

_FEWEST: Final = 2
_IN_ORDER: Final = "SequentialSampler"
"""A training shuffles; this is what a data loader uses that was told nothing."""


class UnshardedSampler(Check[FeedView]):
    """Ranks that train one model together are given the same samples.

    ## What it detects
    In several steps a data loader gives the same indices to all ranks that average their gradients,
    the batches are equal to the byte, and the model is given all of them. Without shuffling, as in
    a trial of a program, it is a note.

    ## Why it matters
    The average of equal gradients is one of them: the job computes on many GPUs what one would, and
    an epoch takes as long as on one.

    ## Example
    `DataLoader(data, shuffle=True)` after `torch.manual_seed(0)` on all ranks; a sampler that was
    given `rank=0` on all of them.

    ## How to fix
    Give the loader a `DistributedSampler`, or let a framework prepare it, with the number of ranks
    that train together and the own rank among them.

    ## References
    - `torch.utils.data.distributed.DistributedSampler`
    """

    code = "DAT002"
    name = "unsharded-sampler"
    severity = Severity.WARNING

    why = "Nothing divides the data: each rank draws the same indices from the same data set."
    fix = "Use a DistributedSampler over the ranks that train the model together."
    fix_changes = "Each rank reads its own part, and an epoch has fewer steps."
    fix_leaves = "The batch size of each rank; the learning rate may need another value."
    disproof = "The first batch, printed on each rank before it enters the model, differs."

    def check(self, view: FeedView) -> Iterator[Finding]:
        """Compare what the ranks were given."""
        same = [each for each in view.passes if _is_same(each)]
        distinct = {fed.samples for each in same for fed in each.values()}
        # One batch again and again is meant: a test whether the model can learn it.
        if len(same) < len(view.passes) or len(distinct) < _FEWEST:
            return
        last = same[-1]
        first = last[min(last)]
        doubt = ""
        if view.is_shared_work:
            doubt = "; they exchange activations or rewards too, so it may be meant"
        elif _IN_ORDER in first.stream:
            doubt = "; they are read in the order of the data set, as in a trial of the program"
        yield self.finding(
            f"{view.model} is given the same samples on {view.ranks.phrase()} in {len(same)} of "
            f"{len(same)} steps that were compared{doubt}",
            ranks=view.ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.model,),
            grade=Grade.NOTE if doubt else Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=view.ranks,
                    summary=f"backward pass {fed.number}: {fed.num_batch} of {fed.num_samples} "
                    f"samples, the same indices and bytes on all of them",
                    values={"stream": fed.stream, "indices": fed.batch, "sample": fed.samples[0]},
                )
                for fed in (each[min(each)] for each in same)
            ),
        )


def _is_same(by_rank: Mapping[int, ModelFed]) -> bool:
    first = by_rank[min(by_rank)]
    is_read = bool(first.batch and first.samples) and "" not in first.samples
    # Ranks that read one batch may each take their part of it before the model.
    is_whole = first.num_batch in first.batch_sizes or _is_alike(by_rank, "inputs")
    is_part = first.num_samples > first.num_batch and len(by_rank) > 1
    is_same = all(_is_alike(by_rank, name) for name in ("stream", "batch", "samples"))
    return is_read and is_whole and is_part and is_same


def _is_alike(by_rank: Mapping[int, ModelFed], name: str) -> bool:
    return len({getattr(fed, name) for fed in by_rank.values()}) == 1
