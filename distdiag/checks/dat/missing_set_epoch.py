"""DAT001: a distributed sampler shuffles every epoch alike."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import place_of, sampler_phrase
from distdiag.events.data import EpochFed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import SampledEpochView

_FEWEST: Final = 8


class MissingSetEpoch(Check[SampledEpochView]):
    """A distributed sampler shuffles every epoch alike.

    ## What you see
    Every epoch has the same order, and each rank sees the same share of the data again: the model
    sees less variety than it seems to. The sampler shuffles by its seed and its epoch, and neither
    changes.

    ## Example
        sampler = DistributedSampler(data)
        for epoch in range(10):
            sampler.set_epoch(epoch)  # right; wrong: without this line
            train(DataLoader(data, sampler=sampler))

    ## How to fix
    Call `set_epoch(epoch)` of the sampler, or of the prepared loader, at the start of each epoch.

    Changes: The order of the samples, and which rank reads which, from the second epoch on.

    Leaves: The number of steps, and which samples an epoch has.

    ## When it is not a defect
    The same order is wanted in each epoch, as in a test whether the model can memorise its data.

    If so, add `ignore = ["DAT001"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "DAT001"
    name = "missing-set-epoch"
    severity = Severity.WARNING

    def check(self, view: SampledEpochView) -> Iterator[Finding]:
        """Compare each rank's pass with the one before."""
        found = {rank: one for rank, one in view.by_rank.items() if _is_repeated(one)}
        if not found:
            return
        first = found[min(found)]
        yield self.finding(
            f"passes {first.number} and {first.number + 1} over {first.dataset} have the same "
            f"order: set_epoch of {sampler_phrase(first.sampler)} is never called",
            ranks=RankSet(found),
            step=first.step,
            location=place_of(found),
            subjects=(first.sampler.chain[-1],),
            grade=Grade.PROVEN,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{one.num_indices} samples, beginning with "
                    f"{', '.join(map(str, one.first))}, in both passes",
                    values={"digest": one.digest, "epoch": one.sampler.epoch},
                )
                for rank, one in found.items()
            ),
        )


def _is_repeated(one: EpochFed) -> bool:
    sampler = one.sampler
    is_shuffled = sampler.shuffle is not False and not one.is_ascending
    is_free = sampler.epoch is None or sampler.num_replicas is None or not sampler.uses_epoch
    if is_free or not is_shuffled or not (one.is_training and one.is_complete):
        return False
    is_same = one.digest == one.last_digest and sampler.epoch == one.last_epoch
    return is_same and one.num_indices >= _FEWEST
