"""DAT007: ranks that train together have different numbers of batches."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import place_of, sampler_phrase
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import EpochView


class UnevenBatches(Check[EpochView]):
    """Ranks that train together have different numbers of batches.

    ## What you see
    The job hangs at the end of the epoch, or a step of one rank meets a step of the next epoch on
    other ranks. The rank with more batches calls collectives that the other ranks never call.

    ## Example
        # wrong: 101 samples on two ranks are 51 and 50
        loader = DataLoader(Subset(data, range(rank, len(data), 2)))
        # right
        loader = DataLoader(data, sampler=DistributedSampler(data, drop_last=True))

    ## How to fix
    Make the parts equally long: a `DistributedSampler`, or `drop_last=True`. Or wrap the loop:
    `with model.join():` for DDP, `with Join([model]):` (torch.distributed.algorithms.join) for
    other modules that support it.

    Changes: How many samples an epoch has.

    Leaves: The gradients of the steps that all ranks take.

    ## When it is not a defect
    The loop ends in the same step on all ranks, or `Join` handles the extra steps.

    If so, add `ignore = ["DAT007"]` to `distdiag.toml`. It is always a note: the hang itself is
    reported by the collectives.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """

    code = "DAT007"
    name = "uneven-batches"
    severity = Severity.WARNING

    def check(self, view: EpochView) -> Iterator[Finding]:
        """Compare how many batches the ranks had."""
        passes = view.by_rank
        if not all(one.is_complete for one in passes.values()):
            return
        counts = {one.num_batches for one in passes.values()}
        if len(counts) < 2 or not all(one.is_training and one.members for one in passes.values()):
            return
        few = RankSet(rank for rank, one in passes.items() if one.num_batches == min(counts))
        first = passes[min(few)]
        # Where the job hangs on it, the checks of collectives say so.
        yield self.finding(
            f"pass {first.number + 1} over {first.dataset} has {min(counts)} batches on "
            f"{few.phrase()} and up to {max(counts)} on other ranks",
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
