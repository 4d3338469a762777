"""DAT004: the epoch of a sampler goes back when training is resumed in the middle of one."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import place_of, sampler_phrase
from distdiag.events.data import EpochFed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import SampledEpochView


class EpochSetBack(Check[SampledEpochView]):
    """The epoch of a sampler goes back when training is resumed in the middle of one.

    ## What you see
    Some samples are trained on twice in the epoch and others never, and the loss differs from that
    of an uninterrupted run. After the resume the sampler is back at an earlier epoch, so the loader
    skips batches of a different order.

    ## Example
        # wrong: the new loader counts its epochs from 0 again
        loader = accelerator.skip_first_batches(loader, done)
        # right
        loader = accelerator.skip_first_batches(loader, done)
        loader.set_epoch(epoch)

    ## How to fix
    Call `set_epoch(epoch)` on the loader that skips batches (with accelerate, the one that
    `accelerator.skip_first_batches` returns), after it is created and before the loop.

    Changes: The samples in the rest of the resumed epoch.

    Leaves: What was already trained on before the resume.

    ## When it is not a defect
    The indices after the resume are the same as those of an uninterrupted run.

    If so, add `ignore = ["DAT004"]` to `distdiag.toml`.

    ## References
    - https://huggingface.co/docs/accelerate/usage_guides/checkpoint
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "DAT004"
    name = "epoch-set-back"
    severity = Severity.WARNING

    def check(self, view: SampledEpochView) -> Iterator[Finding]:
        """Compare the epoch of each rank's pass with what its sampler had before."""
        found = {rank: one for rank, one in view.by_rank.items() if _is_set_back(one)}
        if not found:
            return
        first = found[min(found)]
        yield self.finding(
            f"the epoch of {first.sampler.chain[-1]} went back from {first.epoch_before} to "
            f"{first.sampler.epoch}, and the pass leaves out its first {_num_skipped(first)} "
            "batches",
            ranks=RankSet(found),
            step=first.step,
            location=place_of(found),
            subjects=(first.sampler.chain[-1],),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{sampler_phrase(one.sampler)} begins with "
                    f"{', '.join(map(str, one.first))}",
                    values={"epoch": one.sampler.epoch, "epoch_before": one.epoch_before},
                )
                for rank, one in found.items()
            ),
        )


def _num_skipped(one: EpochFed) -> int:
    # Some loaders fetch one batch ahead, so that the first two are there before the first pass.
    fetched = one.num_before_training - 1 if one.num_before_training > 2 else 0
    return one.sampler.num_skipped or fetched


def _is_set_back(one: EpochFed) -> bool:
    epoch, before = one.sampler.epoch, one.epoch_before
    if epoch is None or before is None or not one.is_training:
        return False
    return epoch < before and _num_skipped(one) > 0
