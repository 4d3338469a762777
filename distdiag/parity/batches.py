"""Whether two runs, and the ranks of one, were fed the samples that they should have been."""

from collections import Counter
from typing import Final

from distdiag.events.ranks import RankSet
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind

_FEWEST: Final = 2

Batches = dict[tuple[int, int], list[bytes]]


def _samples(run: RecordedRun, rank: int) -> Batches:
    """Return the samples of each batch of a rank, as bytes of all their tensors.

    Iterators that were only evaluated on are left out; the others are counted without them.
    """
    found: Batches = {}
    trained = run.summaries[rank].trained
    for _, iterator, number, name in run.places(Kind.BATCH):
        if trained and iterator not in trained:
            continue
        record = run.by_rank(Kind.BATCH, iterator, number, name).get(rank)
        rows = run.rows(rank, record) if record is not None else []
        if not rows:
            continue
        place = (trained.index(iterator) if trained else iterator, number)
        before = found.get(place)
        if before is None or len(before) != len(rows):
            found[place] = rows
        else:
            joined = zip(before, rows, strict=True)
            found[place] = [first + second for first, second in joined]
    return found


def shared_samples(run: RecordedRun) -> tuple[str, RankSet]:
    """Say which data coordinates got the same batches, and their ranks; empty if none did."""
    firsts = [coordinate[0] for coordinate in run.coordinates]
    by_rank = {rank: _samples(run, rank) for rank in firsts}
    for number, rank in enumerate(firsts):
        for other in firsts[number + 1 :]:
            mine, theirs = by_rank[rank], by_rank[other]
            both = mine.keys() & theirs.keys()
            same = [place for place in both if Counter(mine[place]) == Counter(theirs[place])]
            varies = len({tuple(mine[place]) for place in both}) > 1
            if varies and len(both) >= _FEWEST and len(same) > len(both) / 2:
                text = (
                    f"ranks {rank} and {other} got the same samples in {len(same)} of {len(both)} "
                    "batches"
                )
                return text, RankSet([rank, other])
    return "", RankSet()


def differing_data(reference: RecordedRun, candidate: RecordedRun) -> str:
    """Say how the samples of a run differ from those of its reference; empty if they do not."""
    if not _have_one_form(reference, candidate):
        return ""  # parts of a sequence, or lengths that are filled up otherwise
    ours = _all_samples(reference)
    theirs = _all_samples(candidate)
    if ours != theirs and _passes(reference) != _passes(candidate):
        together = _by_step(ours, _passes(reference)), _by_step(theirs, _passes(candidate))
        if all(together):
            ours, theirs = together
    for place in sorted(ours.keys() & theirs.keys()):
        mine, other = Counter(ours[place]), Counter(theirs[place])
        if mine == other:
            continue
        shared = sum((mine & other).values())
        due, number = mine.total(), other.total()
        size = "" if number == due else f"{number} samples, not {due}, and "
        what = f"step by step: batch {place[1]} has {size}{shared} of {due} samples in common"
        everything = (
            Counter(s for each in ours.values() for s in each),
            Counter(s for each in theirs.values() for s in each),
        )
        if everything[0] == everything[1]:
            return f"the same samples come in another order, {what}"
        repeated = sum(count - 1 for count in everything[1].values() if count > 1)
        twice = f"; {repeated} samples come more than once" if repeated else ""
        return f"other samples come, {what}{twice}"
    return ""


def _have_one_form(*runs: RecordedRun) -> bool:
    """Say whether what models are given has samples of one size in all runs.

    Batches that were seen as such are whole in any case.
    """
    if any(each.num_batches for run in runs for each in run.summaries.values()):
        return True
    forms = [
        {
            (name, record.shape[1:])
            for _, iterator, number, name in run.places(Kind.BATCH)
            for record in run.by_rank(Kind.BATCH, iterator, number, name).values()
        }
        for run in runs
    ]
    return forms[0] == forms[-1]


def are_alike(reference: RecordedRun, candidate: RecordedRun) -> bool:
    """Say whether both runs got the same samples in the same order."""
    ours = _all_samples(reference)
    return bool(ours) and ours == _all_samples(candidate)


def _passes(run: RecordedRun) -> int:
    """Return how many backward passes each step has, 0 if it varies."""
    counts = {run.num_micro(step) for step in range(run.num_steps)}
    return counts.pop() if len(counts) == 1 else 0


def _by_step(batches: Batches, num_passes: int) -> Batches:
    """Join the batches of each step, of which each pass takes one; nothing if that is not so."""
    numbers: dict[int, list[int]] = {}
    for iterator, number in batches:
        numbers.setdefault(iterator, []).append(number)
    if not num_passes or any(sorted(each) != list(range(len(each))) for each in numbers.values()):
        return {}
    return {
        (iterator, first // num_passes): [
            sample
            for number in range(first, first + num_passes)
            for sample in batches[iterator, number]
        ]
        for iterator, each in numbers.items()
        for first in range(0, len(each) - num_passes + 1, num_passes)
    }


def _all_samples(run: RecordedRun) -> Batches:
    found: Batches = {}
    for coordinate in run.coordinates:
        for place, samples in _samples(run, coordinate[0]).items():
            found.setdefault(place, []).extend(samples)
    return found
