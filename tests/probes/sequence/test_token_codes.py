"""Numbered tensors, and what is read from them after something was done to them."""

import pytest
import torch

from distdiag.events.sequences import FOREIGN, MIXED, PAD, TokenSpec
from distdiag.probes.sequence.token_codes import TokenCodes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]


def codes_of(dtype=torch.float32, shape=(2, 6, 3, 4), dim=1):
    others = [size for index, size in enumerate(shape) if index != dim]
    return TokenCodes(TokenSpec(shape, dim, others[0], shape[dim]), dtype, CPU)


def read(codes, change=lambda digit: digit):
    return codes.tokens([change(codes.digit(index)) for index in range(codes.num_digits)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2, 6, 3, 4), 1), ((6, 2, 4), 0), ((2, 3, 6, 4), 2), ((2, 6), 1), ((2, 300, 8), 1)],
)
def test_every_token_is_read_as_itself(dtype, shape, dim):
    assert read(codes_of(dtype, shape, dim)) == tuple(range(2 * shape[dim]))


def test_a_part_has_its_tokens_row_by_row():
    assert read(codes_of(), lambda digit: digit[:, 2:4]) == (2, 3, 8, 9)


def test_bfloat16_needs_several_digits_and_each_is_exact():
    codes = codes_of(torch.bfloat16, (2, 300, 8))
    assert codes.num_digits > 1
    assert all(codes.digit(i).double().max() <= 16 for i in range(codes.num_digits))


@pytest.mark.parametrize("value", [0, 1, -100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_usual_padding_is_padding(dtype, value):
    def padded(digit):
        return torch.nn.functional.pad(digit, (0, 0, 0, 0, 0, 1), value=value)

    assert read(codes_of(dtype), padded)[6] == PAD


def test_a_token_id_as_padding_is_no_token():
    codes = codes_of(torch.int64, (2, 6))
    padded = read(codes, lambda digit: torch.nn.functional.pad(digit, (0, 1), value=50256))
    assert padded == (*range(6), PAD, *range(6, 12), PAD)


def test_channels_in_another_order_are_mixed():
    assert set(read(codes_of(), lambda digit: digit.flip(-1))) == {MIXED}


def test_values_that_are_no_numbers_of_ours_are_foreign():
    assert set(read(codes_of(), lambda digit: digit + 0.5)) == {FOREIGN}


def test_another_number_of_dimensions_is_not_read():
    assert read(codes_of(), lambda digit: digit.flatten()) == ()


def test_the_default_device_of_the_program_is_not_used():
    with torch.device("meta"):
        codes = codes_of(torch.bfloat16, (2, 6, 8))
        assert read(codes) == tuple(range(12))
