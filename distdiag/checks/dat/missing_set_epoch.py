"""DAT001: a distributed sampler shuffles every epoch alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import place_of, sampler_phrase
from distdiag.events.data import EpochFed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import EpochView

_FEWEST: Final = 8


class MissingSetEpoch(Check[EpochView]):
    """A distributed sampler shuffles every epoch alike.

    ## What it detects
    A rank trains twice, one pass after the other, on the same samples in the same shuffled order,
    and the epoch of its sampler is the same in both.

    ## Why it matters
    The sampler shuffles by its seed and its epoch. Without `set_epoch` every epoch has the same
    order and the same share for each rank: the model sees less variety than it seems to.

    ## Example
    `for epoch in range(10): train(loader)` with a loader over `DistributedSampler(data)`.

    ## How to fix
    Call `sampler.set_epoch(epoch)` at the start of each epoch.

    ## References
    - `torch.utils.data.distributed.DistributedSampler.set_epoch`
    """

    code = "DAT001"
    name = "missing-set-epoch"
    severity = Severity.WARNING

    why = "The order comes from the seed and the epoch alone, and neither has changed."
    fix = "Call set_epoch(epoch) of the sampler, or of the prepared loader, before each epoch."
    fix_changes = "The order of the samples, and which rank reads which, from the second epoch on."
    fix_leaves = "The number of steps, and which samples an epoch has."
    disproof = "The first indices that the sampler yields differ from epoch to epoch."

    def check(self, alignment: EpochView) -> Iterator[Finding]:
        """Compare each rank's pass with the one before."""
        if alignment.kind != "data":
            return
        found = {rank: one for rank, one in alignment.by_rank.items() if _is_repeated(one)}
        if not found:
            return
        first = found[min(found)]
        yield self.finding(
            f"passes {first.number} and {first.number + 1} over {first.dataset} have one and the "
            f"same order: {sampler_phrase(first.sampler)} is never told the epoch",
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
    is_told = sampler.epoch is None or sampler.num_replicas is None or not sampler.uses_epoch
    if is_told or not is_shuffled or not (one.is_training and one.is_complete):
        return False
    is_same = one.digest == one.last_digest and sampler.epoch == one.last_epoch
    return is_same and one.num_indices >= _FEWEST
