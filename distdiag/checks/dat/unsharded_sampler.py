"""DAT002: ranks that train one model together are given the same samples."""

from collections.abc import Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.events.data import ModelFed
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.relations import SampledInputs


class UnshardedSampler(Check[SampledInputs]):
    """Ranks that train one model together are given the same samples.

    ## What you see
    N GPUs do the work of one: all ranks compute the same gradients, the average of equal gradients
    changes nothing, and an epoch takes as long as on one GPU. Nothing divides the data between the
    ranks.

    ## Example
        torch.manual_seed(0)
        # wrong: each rank draws the same indices
        loader = DataLoader(data, shuffle=True)
        # right
        loader = DataLoader(data, sampler=DistributedSampler(data))

    ## How to fix
    Pass a `DistributedSampler(dataset)` to the loader (`DataLoader(dataset, sampler=sampler)`),
    over the ranks that train the model together. Or let a framework prepare the loader
    (`accelerator.prepare(loader)`).

    Changes: Each rank reads its own part, and an epoch has fewer steps.

    Leaves: The batch size of each rank; the learning rate may need a new value.

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

    def check(self, view: SampledInputs) -> Iterator[Finding]:
        """Compare what the ranks were given."""
        if view.is_right or not all(map(_is_same, view.passes)):
            return
        last = view.passes[-1]
        first = last[min(last)]
        number = len(view.passes)
        yield self.finding(
            f"{view.model} is given the same samples on {view.ranks.phrase()} in {number} of "
            f"{number} steps that were compared{view.doubt}",
            ranks=view.ranks,
            step=first.step,
            location=user_location(first.site.frames),
            subjects=(view.model,),
            grade=Grade.NOTE if view.doubt else Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(_evidence(view)),
        )


def _evidence(view: SampledInputs) -> Iterator[Evidence]:
    for fed in (each[min(each)] for each in view.passes):
        yield Evidence(
            ranks=view.ranks,
            summary=f"backward pass {fed.number}: {fed.num_batch} of {fed.num_samples} "
            f"samples, with the same indices and bytes on all of these ranks",
            values={"stream": fed.stream, "indices": fed.batch, "sample": fed.samples[0]},
        )
    yield Evidence(
        ranks=view.ranks,
        summary=f"the ranks are {view.axis}, as {view.known_by}: {view.cell.reason}",
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
