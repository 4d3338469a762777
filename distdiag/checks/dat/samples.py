"""How many samples ranks read more than once, and how findings describe a sampler."""

from collections.abc import Iterable, Mapping

from distdiag.events.data import EpochFed, SamplerState
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Location


def sampler_phrase(sampler: SamplerState) -> str:
    """Return ``DistributedSampler (seed 3, epoch 0, part 1 of 2)``."""
    known = {"seed": sampler.seed, "epoch": sampler.epoch}
    words = [f"{name} {value}" for name, value in known.items() if value is not None]
    if sampler.num_replicas is not None:
        words.append(f"part {sampler.replica} of {sampler.num_replicas}")
    return sampler.chain[-1] + (f" ({', '.join(words)})" if words else "")


def num_read_twice(passes: Iterable[EpochFed]) -> int | None:
    """Return how many samples several of these ranks read, None if that is not known."""
    seen, twice = 0, 0
    for one in passes:
        if not one.indices:
            return None
        bits = int.from_bytes(one.indices, "little")
        twice |= seen & bits
        seen |= bits
    return twice.bit_count()


def num_left_out(passes: Iterable[EpochFed]) -> int:
    """Return how many samples of the data set none of these ranks read."""
    seen, num_samples = 0, 0
    for one in passes:
        seen |= int.from_bytes(one.indices, "little")
        num_samples = max(num_samples, one.num_samples)
    return num_samples - seen.bit_count()


def has_read_once(one: EpochFed) -> bool:
    """Say whether a rank has read each of its samples once, as far as that is known."""
    return not one.indices or int.from_bytes(one.indices, "little").bit_count() == one.num_indices


def place_of(by_rank: Mapping[int, EpochFed]) -> Location | None:
    """Return where the program iterates over the data."""
    return user_location(by_rank[min(by_rank)].site.frames)


def one_of_each_part(by_rank: Mapping[int, EpochFed]) -> dict[int, EpochFed]:
    """Return one rank of each part of the data: others of the same part share its samples."""
    parts: dict[int, int] = {}
    for rank, one in sorted(by_rank.items()):
        if one.sampler.replica is not None:
            parts.setdefault(one.sampler.replica, rank)
    return {rank: by_rank[rank] for rank in sorted(parts.values())}
