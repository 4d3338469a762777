"""Tests of batches that several ranks recorded, joined into one."""

import pytest
import torch

from distdiag.config.tasks import RankSummary
from distdiag.probes.parity.batches import BatchStore, UnequalBatchesError, write_batch
from distdiag.record.recording import RecordingWriter


@pytest.fixture
def store(tmp_path):
    def store(*batches, **padding):
        for rank, batch in enumerate(batches):
            writer = RecordingWriter(tmp_path, rank)
            write_batch(writer, 0, 0, batch)
            writer.close(
                RankSummary(rank=rank, world_size=2, num_steps=1, num_batches=1, lengths=(5,))
            )
        return BatchStore(tmp_path, padding)

    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_samples_stand_in_the_order_of_the_ranks(store, dtype):
    left, right = torch.zeros(2, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)
    joined = store({"x": left}, {"x": right}).joined((0, 1), 0, 0)["x"]
    assert joined.dtype is dtype
    assert torch.equal(joined, torch.cat([left, right]))


def test_unequal_lengths_are_filled_up_by_name(store):
    long, short = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)
    found = store(
        {"labels": long, "input_ids": long, "mask": long},
        {"labels": short, "input_ids": short, "mask": short},
        input_ids=9,
    ).joined((0, 1), 0, 0)
    assert found["labels"][1].tolist() == [1, 1, -100, -100]
    assert found["input_ids"][1].tolist() == [1, 1, 9, 9]
    assert found["mask"][1].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("made", "padding", "invented"),
    [
        (lambda ids: (ids, ids), {}, ["0", "1"]),
        (lambda ids: (ids, ids), {"1": -100}, ["0"]),
        (lambda ids: (ids, ids), {"0": 0, "1": -100}, []),
        (lambda ids: {"x": ids, "y": ids[:, :1]}, {}, ["x"]),
        (lambda ids: {"input_ids": ids, "labels": ids}, {}, []),
        (lambda ids: {"x": ids, "attention_mask": ids}, {}, []),
        (lambda ids: (ids[:, :2], ids[:, :2]), {}, []),
    ],
    ids=["pair", "one-named", "both-named", "mapping", "labels", "mask", "even"],
)
def test_what_was_filled_up_with_a_value_that_nobody_named_is_reported(
    store, made, padding, invented
):
    batches = [made(torch.ones(1, length, dtype=torch.long)) for length in (4, 2)]
    found = store(*batches, **padding)
    found.joined((0, 1), 0, 0)
    assert list(found.padded) == invented


def test_lists_of_strings_are_joined(store):
    assert store({"t": ["a"]}, {"t": ["b", "c"]}).joined((0, 1), 0, 0)["t"] == ["a", "b", "c"]


def test_a_number_that_differs_cannot_be_joined(store):
    with pytest.raises(UnequalBatchesError, match="n is one value"):
        store({"n": 3}, {"n": 4}).joined((0, 1), 0, 0)
    with pytest.raises(UnequalBatchesError, match="s is one number"):
        store({"s": torch.tensor(1.0)}, {"s": torch.tensor(2.0)}).joined((0, 1), 0, 0)


def test_other_parts_on_some_ranks_cannot_be_joined(store):
    with pytest.raises(UnequalBatchesError, match="other parts"):
        store({"x": torch.ones(1)}, {"y": torch.ones(1)}).joined((0, 1), 0, 0)


def test_a_batch_that_no_rank_had_is_none(store):
    assert store({"x": torch.ones(1)}).joined((0,), 0, 1) is None


def test_the_length_of_the_loader_is_kept(store):
    found = store({"x": torch.ones(1)})
    assert found.length(0, 0) == 5
    assert found.length(0, 1) is None


def test_an_iterator_that_one_rank_uses_alone_does_not_shift_the_others(tmp_path):
    used = {0: ("train", "here", "train"), 1: ("train", "train")}
    for rank, names in used.items():
        writer = RecordingWriter(tmp_path, rank)
        for iterator, name in enumerate(names):
            value = 10 * rank + iterator + 100 * (name == "here")
            write_batch(writer, iterator, 0, {"x": torch.tensor([value])})
        writer.close(
            RankSummary(rank=rank, world_size=2, num_steps=1, num_batches=1, iterators=names)
        )
    store = BatchStore(tmp_path, {})
    found = [store.joined((0, 1), iterator, 0)["x"].tolist() for iterator in range(3)]
    assert found == [[0, 10], [101], [2, 11]]
    assert not store.has((0, 1), 3, 0) and not store.has((0, 1), 0, 1)


def test_an_iterator_that_came_to_its_end_is_told_from_a_recording_that_ended(tmp_path):
    writer = RecordingWriter(tmp_path, 0)
    for iterator in (0, 1):
        write_batch(writer, iterator, 0, {"x": torch.zeros(1)})
    writer.close(RankSummary(rank=0, world_size=1, num_steps=1, num_batches=2, exhausted=(0,)))
    store = BatchStore(tmp_path, {})
    assert store.is_over(0, 0) and not store.is_over(0, 1)
