"""Tests of samples that are kept, and collated into another batch."""

import pickle
import random
import threading

import numpy as np
import torch
from torch.utils.data import default_collate

from distdiag.probes.parity.samples import NO_BATCH, Keeping, Kept, collated, packed


def yes(*_):
    return True


def test_a_view_brings_only_what_it_shows():
    large = torch.arange(1_000_000)
    data = packed([large[3:5], {"x": torch.ones(2, dtype=torch.bfloat16)}])
    assert len(data) < 10_000
    first, second = pickle.loads(data)
    assert first.tolist() == [3, 4]
    assert second["x"].dtype is torch.bfloat16 and second["x"].shape == (2,)


def test_the_samples_are_kept_as_they_were_before_the_function_changed_them():
    def collate(samples):
        return [sample.pop("x") for sample in samples]

    kept = Keeping(collate)([{"x": 1}, {"x": 2}])
    assert isinstance(kept, Kept) and kept.batch == [1, 2]
    assert pickle.loads(kept.samples) == [{"x": 1}, {"x": 2}]


def test_what_cannot_be_pickled_is_a_batch_without_samples():
    kept = Keeping(len)([threading.Lock()])
    assert (kept.batch, kept.samples) == (1, b"")
    assert Keeping(len)({"no": "list"}).samples == b""


def test_the_samples_of_all_ranks_make_one_batch():
    parts = [packed([torch.tensor([1, 2])]), packed([torch.tensor([3, 4])])]
    assert collated(parts, default_collate, yes).tolist() == [[1, 2], [3, 4]]


def test_a_function_that_makes_another_batch_of_the_same_samples_is_not_used():
    parts = [packed([1.0]), packed([2.0])]
    assert collated(parts, default_collate, lambda number, _: number == 0) is NO_BATCH


def test_a_function_that_raises_leaves_the_batches_to_be_joined():
    parts = [packed([torch.ones(2)]), packed([torch.ones(3)])]
    assert collated(parts, default_collate, yes) is NO_BATCH


def test_the_generators_of_the_program_stay_as_they_were():
    def draw(samples):
        return random.random(), np.random.rand(), torch.rand(()), samples

    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert collated([packed([1]), packed([2])], draw, yes) is not NO_BATCH
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
