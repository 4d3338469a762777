"""How many numbers were drawn from a generator is read from its states."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, _utils

from distdiag.probes.data import fetches
from distdiag.probes.data.fetches import Congruence, Fetches, num_drawn, of_numpy, of_python


def python(count):
    generator = random.Random(3)
    before = of_python(generator)
    for _ in range(count):
        generator.getrandbits(32)
    return before, of_python(generator)


def legacy(count):
    generator = np.random.RandomState(3)
    before = of_numpy(generator.get_state(legacy=False))
    generator.randint(0, 1 << 32, count, dtype=np.uint32)
    return before, of_numpy(generator.get_state(legacy=False))


def congruence(count):
    generator = np.random.default_rng(3)
    before = of_numpy(generator.bit_generator.state)
    generator.random(count)
    return before, of_numpy(generator.bit_generator.state)


def of_torch(count):
    generator = torch.Generator().manual_seed(3)
    before = fetches.of_torch(generator)
    torch.rand(count, generator=generator)
    return before, fetches.of_torch(generator)


@pytest.mark.parametrize("count", [0, 1, 623, 624, 625, 5000])
@pytest.mark.parametrize("kind", [python, legacy, congruence, of_torch])
def test_draws_are_counted(kind, count):
    assert num_drawn(*kind(count)) == count


def test_a_seed_in_between_is_seen():
    assert num_drawn(of_python(random.Random(1)), of_python(random.Random(2))) == -1
    states = [of_numpy(np.random.default_rng(seed).bit_generator.state) for seed in (1, 2)]
    assert num_drawn(*states) == -1
    assert num_drawn(states[0], of_python(random.Random(2))) == -1


@pytest.mark.parametrize("seed", [5, (7 << 32) + 5])
def test_a_generator_that_goes_on_from_the_seed_of_its_worker_is_told(monkeypatch, seed):
    monkeypatch.setattr(fetches, "get_worker_info", lambda: SimpleNamespace(seed=seed, id=1))
    own = random.Random(seed)
    own.random()
    due = _utils.worker._generate_state(seed - 1, 1)
    derived = (np.random.RandomState(each) for each in (due, seed % (1 << 32)))
    assert fetches.follows_torch("python", of_python(own))
    assert all(fetches.follows_torch("numpy", of_numpy(d.get_state(legacy=False))) for d in derived)
    assert not fetches.follows_torch("python", of_python(random.Random(0)))
    assert not fetches.follows_torch(
        "numpy", of_numpy(np.random.RandomState(0).get_state(legacy=False))
    )


class Held:
    def __init__(self):
        self.rng, self.draw = np.random.default_rng(0), torch.Generator()
        self.transform, self.other = SimpleNamespace(random=random.Random(1)), "no generator"


def test_generators_that_a_data_set_holds_are_found():
    found = fetches.states(Held())
    assert {"python", "torch", "Held.rng", "Held.draw", "SimpleNamespace.random"} <= found.keys()
    assert isinstance(found["Held.rng"], Congruence)


class Noise:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index + random.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fetches_in_workers_are_written_for_their_rank(observed, num_workers):
    probe = Fetches(observed.recorder)
    probe.install()
    try:
        iterator = iter(DataLoader(Noise(), 2, num_workers=num_workers))
        assert len(list(iterator)) == 8
        found = probe.of(iterator)
    finally:
        probe.uninstall()
    workers = range(num_workers) if num_workers else (-1,)
    assert {(each.worker, each.number) for each in found} == {
        (w, n) for w in workers for n in range(3)
    }
    assert len({each.batch for each in found}) == len(found)
    uses = [use for each in found for use in each.generators]
    assert {(use.name, use.num_drawn, use.is_seeded) for use in uses} == {("python", 4, False)}
