"""DAT002: ranks that train one model together are given the same samples."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import ModelFed
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.data import FeedView

_FEWEST: Final = 2
_IN_ORDER: Final = "SequentialSampler"
"""What a data loader uses by default; training shuffles."""


class UnshardedSampler(Check[FeedView]):
    """Ranks that train one model together are given the same samples.

    ## What you see
    The job computes on many GPUs what one GPU would: the average of equal gradients is one of them,
    and an epoch takes as long as on one. Nothing divides the data between the ranks.

    ## Example
        torch.manual_seed(0)
        # wrong: each rank draws the same indices
        loader = DataLoader(data, shuffle=True)
        # right
        loader = DataLoader(data, sampler=DistributedSampler(data))

    ## How to fix
    Use a `DistributedSampler` over the ranks that train the model together, or let a framework
    prepare the loader.

    Changes: Each rank reads its own part, and an epoch has fewer steps.

    Leaves: The batch size of each rank; the learning rate may need another value.

    ## When it is not a defect
    The ranks share the work on one batch, as tensor-parallel ranks do, or the run is only a trial.

    If so, add `ignore = ["DAT002"]` to `distdiag.toml`. Batches that are read without shuffling are
    a note.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "DAT002"
    name = "unsharded-sampler"
    severity = Severity.WARNING

    def check(self, view: FeedView) -> Iterator[Finding]:
        """Compare what the ranks were given."""
        same = [each for each in view.passes if _is_same(each)]
        distinct = {fed.samples for each in same for fed in each.values()}
        # One batch again and again is meant: it tests whether the model can memorise it.
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
    is_whole = first.num_batch in first.batch_sizes or _is_equal(by_rank, "inputs")
    is_part = first.num_samples > first.num_batch and len(by_rank) > 1
    is_same = all(_is_equal(by_rank, name) for name in ("stream", "batch", "samples"))
    return is_read and is_whole and is_part and is_same


def _is_equal(by_rank: Mapping[int, ModelFed], name: str) -> bool:
    return len({getattr(fed, name) for fed in by_rank.values()}) == 1
