"""Tests of changes by one unit of rounding."""

import pytest
import torch

from distdiag.probes.nudge import nudge_in_place, nudged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_element_moves_by_one_unit_of_rounding(dtype):
    tensor = torch.ones(1000, dtype=dtype)
    nudge_in_place([tensor], 7)
    unit = torch.finfo(dtype).eps
    assert set(tensor.double().tolist()) == {1 - unit, 1 + unit}


def test_a_seed_gives_the_same_change_and_the_generators_of_the_program_stay():
    state = torch.get_rng_state()
    batches = [nudged({"x": torch.ones(50), "label": torch.ones(5, dtype=int)}, 3) for _ in "ab"]
    assert torch.equal(batches[0]["x"], batches[1]["x"])
    assert torch.equal(batches[0]["label"], torch.ones(5, dtype=int))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_that_was_built_before_can_still_be_used():
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    nudge_in_place([weight], 1)
    loss.backward()
    assert weight.grad == pytest.approx(2.0)
