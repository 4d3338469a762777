"""Tests of what is found out about tensors while they are recorded."""

import pytest
import torch

from distdiag.probes.recorded_tensors import _rounded_to


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "")],
)
def test_a_gradient_tells_what_it_was_rounded_to(dtype, found):
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert _rounded_to(tensor.to(dtype).float()) == found


def test_few_elements_and_zeros_tell_nothing():
    assert _rounded_to(torch.ones(15)) == _rounded_to(torch.zeros(100)) == ""


def test_the_rest_of_sums_that_cancel_out_is_no_coarse_dtype():
    generator = torch.Generator().manual_seed(3)
    multiples = torch.randn(64, generator=generator).mul(12).round()
    assert _rounded_to(multiples * 2.0**-36) == ""
