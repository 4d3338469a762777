"""Tests of the figures of what modules return."""

import pytest
import torch

from distdiag.probes.parity.sample_figures import coarser, figures_of


def test_each_sample_has_its_own_figures():
    output = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.bfloat16)
    figures, num_elements, _, dtype = figures_of(output, 2)
    assert figures[:, 0].tolist() == [2.0, 2.0]
    assert figures[:, 1].tolist() == pytest.approx([5.0**0.5, 2.0])
    assert (num_elements, dtype) == (2, "bfloat16")


def test_the_axis_of_the_samples_is_reported():
    assert figures_of(torch.ones(4, 3), 4).axis == 0
    assert figures_of(torch.ones(3, 4), 4).axis == 1
    assert figures_of(torch.ones(12, 3), 4).axis == -1


def test_another_tensor_does_not_stand_in_for_one_that_cannot_be_read():
    pending = torch.ones(4, 3, device="meta")
    assert figures_of((torch.arange(4), torch.ones(4, 3)), 4) is not None
    assert figures_of((pending, torch.ones(4, 3)), 4) is None


def test_the_coarser_of_two_dtypes_has_the_larger_unit():
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"
    assert coarser("", "float32") == coarser("float32", "") == "float32"
