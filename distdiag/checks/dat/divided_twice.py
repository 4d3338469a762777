"""DAT016: two samplers divide the samples by the ranks, one inside the other."""

from collections.abc import Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.checks.dat.samples import num_left_out, num_read_twice, one_of_each_part, place_of
from distdiag.events.data import EpochFed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import SampledEpochView


class DividedTwice(Check[SampledEpochView]):
    """Two samplers divide the samples by the ranks, one inside the other.

    ## What you see
    Each epoch is shorter by the number of ranks than it should be, and the loss looks plausible. A
    sampler gives each rank its part of the samples, and what wraps it for distributed training
    takes only the rank's part of that part.

    ## Example
        # wrong: `prepare` divides by the ranks, too
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        loader = accelerator.prepare(loader)

        # right
        loader = accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True))

    ## How to fix
    Let one of them divide: leave the sampler of your own away, or do not let the library prepare
    the loader.

    Changes: The number of steps in an epoch, and so what schedules should be made for.

    Leaves: The samples in each batch of a rank.

    ## When it is not a defect
    The ranks are intended to read a part of the samples only, in each pass.

    If so, add `ignore = ["DAT016"]` to `distdiag.toml`.

    ## References
    - https://github.com/huggingface/accelerate/issues/4199
    """

    code = "DAT016"
    name = "divided-twice"
    severity = Severity.WARNING

    def check(self, view: SampledEpochView) -> Iterator[Finding]:
        """Look for a pass in which the ranks together read no more than one part."""
        parts = one_of_each_part(view.by_rank)
        if not _are_whole(parts) or num_read_twice(parts.values()) != 0:
            return
        first = parts[min(parts)]
        outer, inner = first.sampler.dividers[0], first.sampler.dividers[-1]
        num, left_out = first.num_samples, num_left_out(parts.values())
        # The batches of a wrapper need not come out even: one of each rank may be missing.
        batch = max(map(_batch, parts.values()))
        due = num - num // len(parts)
        if not due <= left_out <= due + len(parts) * batch:
            return
        yield self.finding(
            f"{left_out} of {num} samples of {first.dataset} are read by none of "
            f"{len(parts)} ranks in pass {first.number + 1}: {outer} divides by the ranks what "
            f"{inner} has divided",
            ranks=RankSet(parts),
            step=first.step,
            location=place_of(parts),
            subjects=(outer, inner),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"reads {one.num_indices} samples, through "
                    f"{' of '.join(one.sampler.chain)}",
                )
                for rank, one in parts.items()
            ),
        )


def _are_whole(parts: Mapping[int, EpochFed]) -> bool:
    """Say whether these are all parts of one pass over one data set, which was trained on."""
    fed = tuple(parts.values())
    if not fed or len(fed) < 2 or any(len(set(one.sampler.dividers)) < 2 for one in fed):
        return False
    is_one = len({(one.num_samples, one.sampler.num_replicas, one.number) for one in fed}) == 1
    is_each = len(fed) == fed[0].sampler.num_replicas
    return is_one and is_each and all(one.is_complete and _has_read_once(one) for one in fed)


def _batch(one: EpochFed) -> int:
    return -(-one.num_indices // max(one.num_batches, 1))


def _has_read_once(one: EpochFed) -> bool:
    """Say whether at most a last batch was filled up with samples that were read before."""
    return int.from_bytes(one.indices, "little").bit_count() >= one.num_indices - _batch(one)
