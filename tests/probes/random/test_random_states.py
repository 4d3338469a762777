"""The states of generators, read without drawing from them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distdiag.probes.generators import digest_of, generator_states
from distdiag.probes.random.states import sharing_ranks
from tests.probes.sample_models import PAIR


def states() -> dict[str, tuple[str, int]]:
    return {each.name: (each.digest, each.seed) for each in generator_states()}


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def test_reading_the_generators_draws_nothing() -> None:
    seed()
    before = states()
    assert states() == before
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    seed()
    assert drawn == (torch.rand(2).tolist(), random.random(), np.random.rand())


def test_each_generator_shows_that_it_was_drawn_from() -> None:
    seed()
    before = states()
    assert before["cpu"][1] == 7
    draws = {"cpu": lambda: torch.rand(1), "python": random.random, "numpy": np.random.rand}
    for name, draw in draws.items():
        seed()
        draw()
        changed = {each for each, state in states().items() if state != before[each]}
        assert changed == {name}


def test_a_generator_that_is_seeded_again_has_the_digest_that_it_had() -> None:
    seed()
    before = states()
    torch.rand(3)
    seed()
    assert states() == before


def test_what_is_no_plain_state_has_no_digest() -> None:
    assert digest_of(None) == ""
    assert digest_of(torch.empty(3, device="meta", dtype=torch.uint8)) == ""


@pytest.mark.parametrize(("rate", "ranks"), [(0.1, PAIR), (0.0, ())], ids=["dropout", "none"])
def test_tensor_parallel_ranks_share_their_activations(
    fake_group: None, rate: float, ranks: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))
    assert sharing_ranks(model) == ()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    assert sharing_ranks(model) == ranks
