"""Tests of the change by one unit of rounding."""

import torch

from distdiag.probes.parity.perturbation import perturb_in_place, perturbed


def change(dtype, unit_of=""):
    tensor = torch.ones(1000, dtype=dtype)
    perturb_in_place([tensor], 7, unit_of)
    return (tensor.double() - 1).abs()


def test_each_element_changes_by_one_unit_of_its_dtype():
    assert torch.equal(change(torch.float32), torch.full((1000,), 2.0**-23, dtype=torch.double))
    assert change(torch.bfloat16).min() > 0


def test_a_coarser_dtype_that_is_computed_in_counts():
    assert change(torch.float32, "bfloat16").min() >= 2.0**-7
    assert torch.equal(change(torch.bfloat16, "float32"), change(torch.bfloat16))


def test_only_floating_point_parts_of_a_batch_change_and_the_generator_stays():
    batch = {"x": torch.ones(4), "labels": torch.arange(4)}
    state = torch.get_rng_state()
    found = perturbed(dict(batch), 3, "bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found["labels"], batch["labels"])
    assert not torch.equal(found["x"], batch["x"])


def test_a_graph_that_was_built_before_can_still_be_used():
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    perturb_in_place([weight], 1)
    loss.backward()
    assert torch.allclose(weight.grad, torch.full((4,), 2.0))


def test_the_default_device_of_the_program_is_not_used():
    tensor = torch.ones(1000)
    with torch.device("meta"):
        perturb_in_place([tensor], 7)
    assert (tensor != 1).all()
