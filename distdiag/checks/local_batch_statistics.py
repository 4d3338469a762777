"""PAR005: batch normalisation uses the statistics of the few samples of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.data_event import ModelFed
from distdiag.data_view import FeedView
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.reasoning.descriptions import user_location

_TINY: Final = 2
_SMALL: Final = 4


class LocalBatchStatistics(Check):
    """Batch normalisation uses the statistics of the few samples of one rank.

    ## What it detects
    A model with plain batch normalisation in training mode, whose ranks average their gradients and
    are given one or two samples each (a note for up to four).

    ## Why it matters
    Each rank normalises by the mean and variance of its own samples. From so few they are noise:
    the same batch on one GPU trains to a better model.

    ## Example
    A detector with `nn.BatchNorm2d` under DDP, with two images on each GPU.

    ## How to fix
    Use `nn.SyncBatchNorm`, freeze the statistics, or use a norm that does not look at the batch.

    ## References
    - `torch.nn.SyncBatchNorm.convert_sync_batchnorm`
    """

    code = "PAR005"
    name = "local-batch-statistics"
    severity = Severity.WARNING
    needs = (ModelFed,)

    why = "DDP averages gradients; the statistics of a batch are those of each rank's own samples."
    fix = "Convert the model with SyncBatchNorm.convert_sync_batchnorm, or freeze the statistics."
    fix_changes = "By what each layer normalises; a little more communication."
    fix_leaves = "Running statistics that were gathered until now."
    disproof = "The mean of a layer's input, printed on each rank, is nearly the same."

    def check_feeds(self, view: FeedView) -> Iterator[Finding]:
        """Look at the numbers of samples."""
        if not all(_has_own_samples(each) for each in view.passes):
            return
        number = max(max(fed.batch_sizes) for each in view.passes for fed in each.values())
        if number > _SMALL:
            return
        last = view.passes[-1]
        first = last[min(last)]
        yield self.finding(
            f"{first.num_local_norms} layers of {view.model} normalise by the statistics of "
            f"{number} samples, each rank by its own",
            ranks=view.ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.model,),
            grade=Grade.LIKELY if number <= _TINY and not view.is_shared_work else Grade.NOTE,
            confidence=0.8,
            evidence=(
                Evidence(
                    ranks=view.ranks,
                    summary=f"{number} samples on each rank, which differ between the ranks, in "
                    f"{len(view.passes)} steps that were compared",
                    values={"num_norms": first.num_local_norms, "num_samples": number},
                ),
            ),
        )


def _has_own_samples(by_rank: Mapping[int, ModelFed]) -> bool:
    fed = list(by_rank.values())
    # With several sizes it is not known which one counts the samples.
    is_told = all(each.num_local_norms and len(each.batch_sizes) == 1 for each in fed)
    return is_told and len({each.inputs for each in fed}) == len(fed) > 1
