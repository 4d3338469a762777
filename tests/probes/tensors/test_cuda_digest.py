from __future__ import annotations

import time

import pytest
import torch

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors import cuda_digest
from distdiag.probes.tensors.bytes import SAMPLE, Statistics
from distdiag.probes.tensors.content import Content, contents
from distdiag.probes.tensors.cuda_digest import Batch
from distdiag.probes.tensors.digest_arithmetic import FIRST, ITEM, LANES, PLACE, SECOND

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def on_cpu(*tensors: torch.Tensor) -> list[tuple[str, int, Statistics]]:
    """Digest with operators of torch, which do on any device what the kernels do."""
    with out_of_sight():
        batch = Batch(list(tensors), CPU, None)
        batch.run()
        return batch.read(batch.results)


def scramble(value: int) -> int:
    value %= 1 << 64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> 33)) * factor % (1 << 64)
    return value ^ (value >> 33)


def model(data: bytes) -> str:
    """Say in plain integers what the digest is."""
    first = second = 0
    for item, start in enumerate(range(0, len(data), ITEM)):
        part = data[start : start + ITEM]
        part += bytes(-len(part) % (4 * LANES))
        for lane in range(LANES):
            one = two = 0
            for at in range(4 * lane, len(part), 4 * LANES):
                word = int.from_bytes(part[at : at + 4], "little")
                one, two = one * FIRST + word, two * SECOND + word
            place = (item * LANES + lane + 1) * PLACE % (1 << 64)
            first += scramble(one + place)
            second += scramble(two % (1 << 64) ^ place)
    last = scramble(first + len(data)), scramble(second + len(data) * PLACE)
    return f"g{last[0]:016x}{last[1]:016x}"


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 8191, 8192, 8197, ITEM - 1, ITEM + 6])
def test_the_digest_is_what_plain_integers_say(num_bytes: int) -> None:
    data = (torch.arange(num_bytes) * 89 % 251).to(torch.uint8)

    ((digest, number, _),) = on_cpu(data)

    assert number == num_bytes
    assert digest == model(data.numpy().tobytes())


def test_bytes_are_hashed_across_the_borders_of_what_is_copied_at_a_time() -> None:
    tensor = torch.randint(-99, 99, (3_000_001, 3), dtype=torch.int16)  # 17 MiB, an odd number

    (transposed, _, _), (copied, _, _) = on_cpu(tensor.T, tensor.T.contiguous())

    assert transposed == copied


def test_what_changes_place_or_value_changes_the_digest() -> None:
    tensor = torch.arange(600_000, dtype=torch.int32)
    changed = [tensor]
    for one, other in ((0, 1), (0, LANES), (5, ITEM // 4 + 5), (0, 599_999)):
        swapped = tensor.clone()
        swapped[one], swapped[other] = tensor[other], tensor[one]
        changed.append(swapped)
    for bit in (0, 31):
        flipped = tensor.clone()
        flipped[-1] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        changed.append(flipped)
    changed += [tensor.flip(0), tensor[:-1], torch.zeros(600_000), torch.zeros(600_001)]

    halves = [(digest[1:17], digest[17:]) for digest, _, _ in on_cpu(*changed)]

    assert len({first for first, _ in halves}) == len(changed)
    assert len({second for _, second in halves}) == len(changed)


def test_parts_that_are_hashed_one_after_the_other_keep_their_places() -> None:
    tensor = torch.arange(2 * ITEM, dtype=torch.int32)  # eight items, hashed four at a time

    (mine, _, _), (rolled, _, _) = on_cpu(tensor, tensor.roll(ITEM))

    assert mine != rolled


TENSORS = {
    "float32": torch.randn(700_003),
    "odd number of words": torch.randn(700_002),
    "half a word at the end": torch.randn(700_003).bfloat16(),
    "transposed": torch.randn(513, 1025).T,
    "large and strided": torch.randn(2_000_000, 3)[:, :2],
    "odd": torch.randn(7).half(),
    "float64": torch.randn(100_000).double(),
    "float8": torch.randn(1000).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(40_000) - 500,
    "int8": torch.arange(-3, 5, dtype=torch.int8),
    "uint8": torch.arange(299).to(torch.uint8)[1:],
    "int16": torch.arange(5, dtype=torch.int16),
    "int32": torch.arange(5, dtype=torch.int32),
    "complex64": torch.randn(70, dtype=torch.complex64),
    "complex128": torch.randn(70, dtype=torch.complex128),
    "special": torch.tensor([float("nan"), float("inf"), 0.0, -0.0, 1e-40, 1.0]),
    "special bfloat16": torch.tensor([float("nan"), float("-inf"), 0.0, 1e-40, 1.0]).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0),
}


def on_gpu(*tensors: torch.Tensor) -> list[Content]:
    found = contents(tensors).wait()
    assert None not in found
    return [each for each in found if each is not None]


@needs_cuda
@pytest.mark.parametrize("name", TENSORS)
def test_kernels_say_what_operators_of_torch_say(name: str) -> None:
    tensor = TENSORS[name]
    apart = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    apart.copy_(tensor)
    ((digest, number, values),) = on_cpu(tensor)

    (found,) = on_gpu(apart)

    assert cuda_digest._kernels[0] is not None, "the kernels do not work here"
    assert (found.digest, found.num_elements) == (digest, number)
    if values.num_finite:
        assert (found.least, found.greatest) == (values.least, values.greatest)
        assert found.mean == pytest.approx(values.total / values.num_finite, abs=1e-12)
        assert found.nan_share == values.num_nan / values.num_values
        assert found.zero_share == values.num_zero / values.num_values
        assert found.subnormal_share == values.num_subnormal / values.num_values


@needs_cuda
def test_operators_of_torch_do_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.cuda() for tensor in TENSORS.values()]
    expected = on_gpu(*tensors)
    monkeypatch.setattr(cuda_digest, "_kernels", [None])

    found = on_gpu(*tensors)

    assert [each.digest for each in found] == [each.digest for each in expected]
    assert repr([each[5:] for each in found]) == repr([each[5:] for each in expected])


@needs_cuda
def test_views_at_any_address_equal_their_copies() -> None:
    flat = torch.randn(3_000_000, device="cuda").bfloat16()
    for start in (0, 1, 2, 3, 8):
        view = flat[start : start + 2_100_001]
        one, other = on_gpu(view, view.clone())
        assert one == other


@needs_cuda
def test_the_sample_has_both_ends() -> None:
    tensor = torch.zeros(100 * SAMPLE, device="cuda")
    tensor[0], tensor[-1] = -1.0, 2.0

    (found,) = on_gpu(tensor)

    assert (found.least, found.greatest) == (-1.0, 2.0)


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_next_write_waits_for_the_reading_and_the_host_for_nothing() -> None:
    tensor = torch.ones(1 << 28, device="cuda")
    (expected,) = on_gpu(tensor)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 28)
        pending = contents([tensor])
        assert pending.take() is None
        pending.guard()
        tensor.zero_()
        del tensor
    finally:
        torch.cuda.set_sync_debug_mode("default")

    deadline = time.monotonic() + 30
    while (taken := pending.take()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert taken == [expected]


@needs_cuda
def test_while_a_graph_is_captured_nothing_is_read() -> None:
    tensor = torch.ones(1000, device="cuda")
    pending = contents([tensor])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = contents([tensor]).take()
        pending.guard()
        assert pending.take() is None
        tensor += 1
    graph.replay()

    assert captured == [None]
    assert pending.wait() != [None]
    assert on_gpu(tensor) == on_gpu(torch.full((1000,), 2.0, device="cuda"))


@needs_cuda
def test_tensors_of_two_devices_keep_their_order() -> None:
    on_host, on_device = torch.ones(3), torch.zeros(5, device="cuda")

    found = on_gpu(on_device, on_host, on_device)

    assert [each.digest[0] for each in found] == ["g", "c", "g"]
    assert [each.num_elements for each in found] == [5, 3, 5]
