from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from distdiag.events.data import EpochFed
from tests.probes.conftest import Observed


def data(number: int = 16) -> TensorDataset:
    return TensorDataset(torch.arange(float(number)).reshape(number, 1))


def loader(sampler: DistributedSampler[object] | None = None, **values: object) -> DataLoader:
    dataset = sampler.dataset if sampler is not None else data()
    return DataLoader(dataset, batch_size=4, sampler=sampler, **values)


def train(batches: DataLoader, weight: torch.Tensor | None = None) -> list[float]:
    weight = torch.ones(1, requires_grad=True) if weight is None else weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen: list[float] = []
    for (batch,) in batches:
        (batch * weight).sum().backward()
        optimizer.step()
        seen += batch.flatten().tolist()
    return seen


def passes(observed: Observed) -> list[EpochFed]:
    for probe in observed.probes:
        probe.flush()
    return observed.events(EpochFed)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pass_is_written_with_its_indices_and_its_sampler(
    observed: Observed, num_workers: int
) -> None:
    observed.install("steps", "data")
    sampler = DistributedSampler(data(), num_replicas=2, rank=1, seed=7)
    sampler.set_epoch(3)

    seen = train(loader(sampler, num_workers=num_workers))

    (reported,) = passes(observed)
    assert reported.first == tuple(map(int, seen[:8]))
    assert reported.num_indices == 8
    assert reported.num_batches == 2
    assert reported.is_complete
    assert reported.is_training
    assert reported.num_samples == 16
    assert (reported.sampler.epoch, reported.sampler.seed) == (3, 7)
    assert (reported.sampler.replica, reported.sampler.num_replicas) == (1, 2)
    assert reported.sampler.chain[-1] == "DistributedSampler"
    assert reported.sampler.dividers == ("DistributedSampler",)
    bits = int.from_bytes(reported.indices, "little")
    assert {i for i in range(16) if bits >> i & 1} == set(map(int, seen))
    assert len(set(reported.contents)) == 8


def test_passes_of_one_loader_are_compared_with_the_one_before(observed: Observed) -> None:
    observed.install("steps", "data")
    batches = loader(DistributedSampler(data(), num_replicas=2, rank=0))

    weight = torch.ones(1, requires_grad=True)
    for _ in range(2):
        train(batches, weight)

    first, second = passes(observed)
    assert (first.number, second.number) == (0, 1)
    assert first.last_digest == ""
    assert second.last_digest == first.digest == second.digest
    assert second.last_epoch == 0


def test_passes_that_train_something_else_each_are_not_compared(observed: Observed) -> None:
    observed.install("steps", "data")
    batches = loader(DistributedSampler(data(), num_replicas=2, rank=0))

    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    for weight in weights:
        train(batches, weight)

    first, second = passes(observed)
    assert second.digest == first.digest
    assert second.last_digest == ""


def test_an_evaluation_is_no_training(observed: Observed) -> None:
    observed.install("steps", "data")

    with torch.no_grad():
        list(loader())

    (reported,) = passes(observed)
    assert not reported.is_training
    assert reported.is_ascending


def test_an_evaluation_is_not_counted_among_the_passes_of_training(observed: Observed) -> None:
    observed.install("steps", "data")
    batches = loader()

    train(batches)
    with torch.no_grad():
        list(batches)
    train(batches)

    assert [reported.number for reported in passes(observed) if reported.is_training] == [0, 1]


def test_a_pass_that_is_ended_early_is_reported_so(observed: Observed) -> None:
    observed.install("steps", "data")

    for _ in loader():
        break

    (reported,) = passes(observed)
    assert not reported.is_complete
    assert reported.num_batches == 1


def test_two_loaders_at_the_same_time_are_two_streams(observed: Observed) -> None:
    observed.install("steps", "data")
    both = data()

    one, other = (loader(DistributedSampler(both, 1, 0)) for _ in range(2))
    list(zip(one, other, strict=True))

    first, second = passes(observed)
    assert first.stream != second.stream


def test_the_epoch_that_the_sampler_had_before_is_known(observed: Observed) -> None:
    observed.install("steps", "data")
    sampler = DistributedSampler(data(), num_replicas=2, rank=0)
    sampler.set_epoch(5)
    batches = loader(sampler)
    sampler.set_epoch(0)

    train(batches)

    (reported,) = passes(observed)
    assert (reported.epoch_before, reported.sampler.epoch) == (5, 0)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def test_a_data_set_without_indices_is_left_alone(observed: Observed) -> None:
    observed.install("steps", "data")

    assert len(list(DataLoader(Stream(), batch_size=4))) == 2

    assert passes(observed) == []


def test_neither_order_nor_generators_change(observed: Observed) -> None:
    def run() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        batches = DataLoader(data(), batch_size=4, shuffle=True)
        return train(batches) + torch.randn(2).tolist(), torch.get_rng_state()

    plain = run()
    observed.install("steps", "data")
    watched = run()

    assert plain[0] == watched[0]
    assert torch.equal(plain[1], watched[1])


class Sorted(DistributedSampler[object]):
    """Has an epoch, as its base has, and does not use it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.total_size, self.num_replicas)[::-1])


class Reversed(DistributedSampler[object]):
    """Turns the order of its base round, which uses the epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize(
    ("kind", "uses_epoch"), [(Sorted, False), (Reversed, True), (DistributedSampler, True)]
)
def test_whether_the_order_comes_from_the_epoch_is_read_from_the_code(
    observed: Observed, kind: type[DistributedSampler[object]], uses_epoch: bool
) -> None:
    observed.install("steps", "data")

    train(loader(kind(data(), num_replicas=2, rank=0)))

    (reported,) = passes(observed)
    assert reported.sampler.uses_epoch is uses_epoch


def test_the_parts_of_some_samples_are_told_by_their_index(observed: Observed) -> None:
    observed.install("steps", "data")
    rows = [{"x": torch.full((3,), float(i)), "group": i % 2} for i in range(80)]
    sampler = DistributedSampler(rows, num_replicas=2, rank=0)  # type: ignore[arg-type]
    for number in range(4):
        sampler.set_epoch(number)
        for batch in DataLoader(rows, batch_size=8, sampler=sampler):  # type: ignore[arg-type]
            (batch["x"].sum() * torch.ones(1, requires_grad=True)).backward()
    found = passes(observed)
    assert {each.parts for each in found[:3]} == {(("x", False), ("group", True))}
    read: dict[int, set[tuple[str, ...]]] = {}
    for index, digests in (each for one in found for each in one.samples):
        read.setdefault(index, set()).add(digests)
    assert set(read) <= set(range(64))
    assert all(len(each) == 1 for each in read.values())
    assert len({digests[1] for each in read.values() for digests in each}) == 2
    assert found[3].samples == ()


def shuffled(numbers: list[float], seed: int) -> DataLoader:
    dataset = TensorDataset(torch.tensor(numbers).reshape(-1, 1))
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)


@pytest.mark.usefixtures("fake_group")
def test_a_list_that_nothing_divides_is_known_by_its_least_digests(observed: Observed) -> None:
    observed.install("steps", "data")
    numbers = [float(number) for number in range(10)]
    train(shuffled(numbers, 1))
    train(shuffled(numbers[::-1], 2))
    train(shuffled([*numbers[:5], *range(20, 25)], 3))
    train(shuffled([1.0, 2.0, 2.0], 4))

    first, same, other, with_equal = [each.least for each in passes(observed)]
    assert len(first) == 10
    assert first == same
    assert len(set(first) & set(other)) == 5
    assert with_equal == ()


@pytest.mark.usefixtures("fake_group")
def test_what_a_sampler_divides_or_only_a_part_was_read_of_is_not(observed: Observed) -> None:
    observed.install("steps", "data")
    train(loader(DistributedSampler(data(), num_replicas=2, rank=0)))
    for _ in shuffled([1.0, 2.0, 3.0, 4.0, 5.0], 1):
        break
    assert [each.least for each in passes(observed)] == [(), ()]


class Shard:
    """Gives a process its share of the batches, as libraries do that prepare a loader."""

    def __init__(self, batch_sampler: object, num_processes: int, process_index: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):  # type: ignore[arg-type, var-annotated]
            if number % self.num_processes == self.process_index:
                yield batch


def test_samplers_that_divide_by_ranks_are_counted(observed: Observed) -> None:
    observed.install("steps", "data")
    sampler = DistributedSampler(data(32), num_replicas=2, rank=0)
    batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    train(DataLoader(data(32), batch_sampler=Shard(batches, 2, 0)))

    (reported,) = passes(observed)
    assert reported.sampler.dividers == ("Shard", "DistributedSampler")
    assert reported.num_indices == 8
