"""Finds fetches of different samples that drew the same random numbers, over workers and ranks."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, NamedTuple

from distdiag.events.data import EpochFed, Fetch, GeneratorUse
from distdiag.events.ranks import RankSet
from distdiag.views.relations import FEW_DRAWS, FIRST_FETCH, SEEDED_ALIKE, AugmentationView, Axis

_FEWEST: Final = 2


class _Drawn(NamedTuple):
    """A generator that a fetch of a rank drew from."""

    rank: int
    fetch: Fetch
    use: GeneratorUse

    @property
    def numbers(self) -> Hashable:
        """What is the same where the same numbers were drawn."""
        return (self.use.name, self.use.before, self.use.after, self.use.is_for_batch)

    @property
    def is_for_samples(self) -> bool:
        """Whether so many numbers were drawn that each sample may have its own."""
        return not self.use.is_for_batch and self.use.num_drawn >= self.fetch.num_samples


def augmentations(
    by_rank: Mapping[int, EpochFed], *, are_together: bool
) -> Iterator[AugmentationView]:
    """Yield what workers of one rank share, and what ranks do that train one model together.

    `are_together`: it is known that the ranks do so.
    """
    trained = {rank: one for rank, one in by_rank.items() if one.is_trained}
    drawn = [
        _Drawn(rank, fetch, use)
        for rank, one in trained.items()
        for fetch in one.fetches
        for use in fetch.generators
    ]
    seen = set()
    for rank in trained:
        own = [each for each in drawn if each.rank == rank and each.fetch.worker >= 0]
        for shared in _shared(own, lambda each: each.fetch.number):
            seen.add(shared[0][0].use.name)
            yield _view(Axis.WORKER, trained[rank], shared)
    if are_together:
        rest = [each for each in drawn if each.use.name not in seen]
        for shared in _shared(rest, lambda each: (each.fetch.worker, each.fetch.number)):
            yield _view(Axis.DATA, trained[shared[0][0].rank], shared)


def _shared(
    drawn: list[_Drawn], place: Callable[[_Drawn], Hashable]
) -> Iterator[list[list[_Drawn]]]:
    """Yield for each generator what was drawn alike at the same place for different samples."""
    groups: dict[Hashable, list[_Drawn]] = {}
    for each in drawn:
        groups.setdefault((place(each), each.numbers), []).append(each)
    found: dict[str, list[list[_Drawn]]] = {}
    for group in groups.values():
        batches = {each.fetch.batch for each in group}
        if len(group) >= _FEWEST and len(batches) == len(group):
            found.setdefault(group[0].use.name, []).append(group)
    yield from found.values()


def _view(axis: Axis, one: EpochFed, shared: list[list[_Drawn]]) -> AugmentationView:
    everything = [each for group in shared for each in group]
    exceptions = []
    if not all(each.is_for_samples for each in everything):
        exceptions.append(FEW_DRAWS)
    if not any(each.fetch.number for each in everything):
        exceptions.append(FIRST_FETCH)
    if axis is Axis.DATA and not all(each.use.is_seeded for each in everything):
        exceptions.append(SEEDED_ALIKE)
    by = _rank if axis is Axis.DATA else _worker
    return AugmentationView(
        axis,
        one.stream,
        RankSet(map(_rank, everything)),
        tuple({by(each): each.fetch for each in group} for group in shared),
        everything[0].use,
        one.fetched_by or one.site,
        one.step,
        tuple(exceptions),
    )


def _rank(drawn: _Drawn) -> int:
    return drawn.rank


def _worker(drawn: _Drawn) -> int:
    return drawn.fetch.worker
