from __future__ import annotations

import math
import subprocess
import sys
import warnings

import pytest
import torch
import xxhash
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.probes.tensors.bytes import SAMPLE, Statistics, quick_statistics, statistics
from distdiag.probes.tensors.content import Content, contents

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool, torch.complex64, torch.complex128),
]


def content(tensor: torch.Tensor) -> Content:
    taken = contents([tensor]).take()
    assert taken is not None
    (found,) = taken
    assert found is not None
    return found


def digest(tensor: torch.Tensor) -> str:
    return content(tensor).digest


def test_the_digest_is_of_the_bytes_and_says_where_it_was_made() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)

    assert digest(tensor) == "c" + xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) == digest(tensor.view(torch.float32).view(20, 50))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_has_content(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 0.0, 1.0, 2.0]).to(dtype)

    found = content(tensor)

    assert found.num_elements == 4
    assert found.greatest == (1.0 if dtype is torch.bool else 2.0)
    assert found.digest == digest(tensor.clone()) != digest(tensor.view(torch.uint8) ^ 1)


def test_rows_elements_and_bits_that_change_place_or_value_change_the_digest() -> None:
    tensor = torch.arange(12_000, dtype=torch.float32).view(40, 300)
    swapped = tensor.clone()
    swapped[3, 5], swapped[9, 7] = tensor[9, 7], tensor[3, 5]
    flipped = tensor.clone()
    flipped.view(torch.int32)[39, 299] ^= 1

    digests = {digest(each) for each in (tensor, tensor.flip(0), swapped, flipped, tensor[:-1])}

    assert len(digests) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.complex128], ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    tensor = torch.arange(3 * 700 * 1001).to(dtype).view(3, 700, 1001)

    repeated = tensor[:, :1].expand(3, 9, 1001)
    for view in (tensor.mT, tensor.permute(2, 0, 1), tensor[:, ::3, 1:], repeated):
        assert not view.is_contiguous()
        assert content(view) == content(view.contiguous())


def test_rows_larger_than_a_block_are_split() -> None:
    tensor = torch.arange(3 * 600_000, dtype=torch.float32).view(600_000, 3)

    assert digest(tensor.T) == digest(tensor.T.contiguous())


def test_views_of_one_storage_have_their_own_content() -> None:
    flat = torch.arange(10.0)

    assert digest(flat[1:4]) == digest(torch.tensor([1.0, 2.0, 3.0]))
    assert content(flat[5:]).least == 5.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_shares_of_special_values(dtype: torch.dtype) -> None:
    subnormal = torch.finfo(dtype).tiny / 4
    values = [
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        subnormal,
        -subnormal,
        -subnormal,
        3.0,
        -1.0,
    ]

    found = content(torch.tensor(values, dtype=dtype))

    assert (found.nan_share, found.zero_share, found.subnormal_share) == (0.1, 0.2, 0.3)
    assert (found.least, found.greatest) == (-1.0, 3.0)
    assert found.mean == pytest.approx(2.0 / 7, rel=1e-3)


def test_without_finite_values_there_is_no_range() -> None:
    for tensor in (torch.full((3,), math.nan), torch.zeros(0), torch.tensor([math.inf])):
        found = content(tensor)
        assert math.isnan(found.least)
        assert math.isnan(found.greatest)
        assert math.isnan(found.mean)


def test_a_scalar_and_an_empty_tensor() -> None:
    assert content(torch.tensor(2.5))[1:] == (1, 2.5, 2.5, 2.5, 0.0, 0.0, 0.0)
    assert digest(torch.zeros(0, 3)) == digest(torch.zeros(0, dtype=torch.int8))


def test_statistics_of_few_values_are_exact_and_of_many_are_a_sample_with_both_ends() -> None:
    small = torch.zeros(SAMPLE)
    small[1234] = 7.0
    large = torch.zeros(100 * SAMPLE)
    large[1] = 100.0  # between the first two that are looked at
    large[0], large[-1] = -1.0, 2.0

    assert content(small).greatest == 7.0
    assert (content(large).least, content(large).greatest) == (-1.0, 2.0)
    assert content(large).zero_share == (SAMPLE - 2) / SAMPLE
    assert content(large.view(SAMPLE, 100).T.contiguous().T) == content(large)


def test_what_has_no_bytes_of_its_own_has_no_content() -> None:
    with FakeTensorMode() as mode:
        fake = torch.zeros(3)
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    shortened = torch.zeros(3)
    shortened.untyped_storage().resize_(8)
    nothing = [
        torch.zeros(3, device="meta"),
        fake,
        mode.from_tensor(torch.zeros(3)),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        freed,
        shortened,
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.nn.parameter.UninitializedParameter(),
    ]

    taken = contents([*nothing, torch.ones(3)]).take()

    assert taken is not None
    assert taken[:-1] == [None] * len(nothing)
    assert taken[-1] is not None


def test_tensors_inside_a_transform_have_no_content() -> None:
    taken = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        taken.append(contents([tensor]).take())
        return tensor

    torch.vmap(look)(torch.ones(3, 2))

    assert taken == [[None]]


class Marked(torch.Tensor):
    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Marked.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_and_subclasses_do_not_notice() -> None:
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    plain = torch.arange(40_000.0).view(200, 200).T
    marked = plain.as_subclass(Marked)
    Marked.seen = 0
    with Dispatch(), Function(), FakeTensorMode():
        taken = contents([plain, marked]).take()

    assert taken == [content(plain), content(plain)]
    assert seen == []
    assert Marked.seen == 0


def test_nothing_of_the_training_changes() -> None:
    weight = torch.nn.Parameter(torch.randn(300, 200))
    loss = (weight.T @ weight).sum()
    tensors = [weight, weight.T, weight.detach(), loss]
    state, versions = torch.get_rng_state(), [each._version for each in tensors]
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            taken = contents(tensors).wait()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)

    assert None not in taken
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert [each._version for each in tensors] == versions
    assert weight.grad is None
    loss.backward()
    assert weight.grad is not None


def test_inference_tensors_are_read_inside_and_outside() -> None:
    with torch.inference_mode():
        tensor = torch.arange(12.0).view(3, 4)
        inside = contents([tensor.T]).take()
        assert torch.is_inference_mode_enabled()

    assert inside == [content(tensor.T)] == [content(torch.arange(12.0).view(3, 4).T)]


def test_default_type_and_device_do_not_matter() -> None:
    tensor = torch.arange(50_000.0).view(2, -1).T
    expected = content(tensor)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert content(tensor) == expected
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_a_pending_can_be_asked_again() -> None:
    pending = contents([torch.ones(2)])

    pending.guard()

    assert pending.take() == pending.take() == pending.wait()


def test_reading_on_a_cpu_never_loads_triton() -> None:
    program = (
        "import sys, torch; from distdiag.probes.tensors.content import contents; "
        "before = 'triton' in sys.modules; contents([torch.ones(3)]).wait(); "
        "sys.exit(before or 'triton' in sys.modules or "
        "'distdiag.probes.tensors.digest_kernels' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    "values",
    [
        [2.5],
        [0.0],
        [-1.0, 0.0, 3.0],
        [1e-40, 0.0, -1e-41, 5.0],
        [1e-39],
        [0.1, 0.2, 1e38, -1e38],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_few_operators_find_the_same(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values).to(dtype)
    quick = quick_statistics(tensor)
    slow = Statistics(*statistics(tensor).tolist())
    assert quick == (slow if slow.num_finite == len(values) else None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_few_operators_find_the_same_of_whole_numbers(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert quick_statistics(tensor) == Statistics(*statistics(tensor).tolist())
