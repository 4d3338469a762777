"""Digests and statistics of tensors on a CUDA device, made beside the current stream.

``digest_arithmetic`` says how the digest is made. With Triton two launches hash all tensors; where
it is missing or does not work, the same numbers come from torch operators, slowly. The tables that
tell the kernels what to read and the results cross by way of pinned memory, so nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import (
    NO_STATISTICS,
    Statistics,
    as_bits,
    is_numeric,
    pieces,
    sample,
    statistics,
)
from distdiag.probes.tensors.digest_arithmetic import (
    ITEM,
    ROW,
    hash_item,
    hexadecimal,
    powers,
    upload,
)
from distdiag.record.guard import Guard

# What is not contiguous, or badly aligned, is copied and hashed so many items at a time.
_SPAN: Final = 4 * ITEM

Result = tuple[str, int, Statistics]


class Span(NamedTuple):
    """Adjacent bytes of a tensor, which begin at a border of items."""

    address: int
    num_bytes: int
    first_item: int
    owner: int


class _Facts(NamedTuple):
    """What is still to be known of a tensor when it is gone."""

    num_bytes: int
    number: int
    is_numeric: bool


class Batch:
    """Tensors of one device and the one buffer that the results go to."""

    def __init__(
        self, tensors: list[torch.Tensor], device: torch.device, kernels: ModuleType | None
    ) -> None:
        self.device = device
        self.tensors = tensors
        self._facts = [_Facts(each.nbytes, each.numel(), is_numeric(each)) for each in tensors]
        self._kernels = kernels
        self._weights: torch.Tensor | None = None
        self._direct: dict[int, list[Span]] = {16: [], 4: []}
        self._copied: list[torch.Tensor] = []
        owners: list[int] = []
        for owner, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            address = tensor.data_ptr()
            alignment = next((each for each in self._direct if address % each == 0), 0)
            if kernels is not None and alignment and tensor.is_contiguous():
                self._direct[alignment].append(Span(address, tensor.nbytes, 0, owner))
            else:
                self._copied.append(as_bits(tensor))
                owners.append(owner)
        self._scratch = self._find_room()
        address = self._scratch.data_ptr()
        spans = [span for each in self._direct.values() for span in each]
        for tensor, owner in zip(self._copied, owners, strict=True):
            spans += _copied_spans(tensor, owner, address)
        table, self._owners = _table(spans)
        self._num_sums = 2 * table.shape[0]
        self._items = upload(table, device)
        size = self._num_sums + 8 * len(tensors)
        self.results = torch.empty(size, dtype=torch.int64, device=device)
        self._sums = self.results[: self._num_sums].view(-1, 2)

    def run(self) -> None:
        """Put all the reading into the current stream."""
        begin = 0
        for alignment, each in self._direct.items():
            end = begin + sum(-(-span.num_bytes // ITEM) for span in each)
            if end > begin and self._kernels is not None:
                self._kernels.hash_items(self._items[begin:end], self._sums[begin:end], alignment)
            begin = end
        for tensor in self._copied:
            for num_bytes in _fill(tensor, self._scratch):
                end = begin + -(-num_bytes // ITEM)
                self._hash_scratch(num_bytes, begin, end)
                begin = end
        self._sum_up()

    def release(self, stream: torch.cuda.Stream) -> None:
        """Let go of the tensors: their memory is given to nobody before the stream has read it.

        Gradients that were kept until somebody asks for what they hold would be there twice.
        """
        try:
            for tensor in self.tensors:
                tensor.record_stream(stream)
        except RuntimeError:
            return  # memory of another allocator: kept until it was read
        self.tensors, self._copied = [], []

    def _find_room(self) -> torch.Tensor:
        most = max((tensor.nbytes for tensor in self._copied), default=0)
        num_bytes = min(_round_up(most, ROW), _SPAN) + min(most, ITEM)
        return torch.empty(_round_up(num_bytes, 16), dtype=torch.uint8, device=self.device)

    def _hash_scratch(self, num_bytes: int, begin: int, end: int) -> None:
        items, sums = self._items[begin:end], self._sums[begin:end]
        if self._kernels is not None:
            self._kernels.hash_items(items, sums, 16)
            return
        padded = _round_up(num_bytes, ROW)
        self._scratch[num_bytes:padded].zero_()
        words = self._scratch[:padded].view(torch.int32)
        if self._weights is None:
            self._weights = powers(self.device)
        for which, start in enumerate(range(0, words.numel(), ITEM // 4)):
            item = words[start : start + ITEM // 4]
            hash_item(item, items[which, 2], self._weights, sums[which])

    def _sum_up(self) -> None:
        out = self.results[self._num_sums :].view(torch.float64).view(-1, 8)
        rows: dict[torch.dtype, list[tuple[int, ...]]] = {}
        kept: list[torch.Tensor] = []  # until the kernel is launched, their memory is theirs
        for slot, tensor in enumerate(self.tensors):
            if not tensor.numel() or not is_numeric(tensor):
                continue
            values = tensor if tensor.is_contiguous() else sample(tensor)
            if self._kernels is None or tensor.dtype not in self._kernels.SUMMED_UP:
                out[slot].copy_(statistics(sample(values)))
                continue
            kept.append(values)
            number = values.numel() * (2 if values.is_complex() else 1)
            rows.setdefault(tensor.dtype, []).append((values.data_ptr(), number, slot, 0))
        if self._kernels is None or not rows:
            return
        table = [row for each in rows.values() for row in each]
        on_device = upload(torch.tensor(table, dtype=torch.int64, device="cpu"), self.device)
        begin = 0
        for dtype, each in rows.items():
            self._kernels.sum_up(on_device[begin : begin + len(each)], out, dtype)
            begin += len(each)

    def read(self, results: torch.Tensor) -> list[Result]:
        """Return digest, number of elements and statistics of each tensor from a host buffer."""
        items, values = results[: self._num_sums], results[self._num_sums :]
        sums = torch.zeros(len(self._facts), 2, dtype=torch.int64, device="cpu")
        sums.index_add_(0, self._owners, items.view(-1, 2))
        rows = values.view(torch.float64).view(-1, 8).tolist()
        return [
            (
                hexadecimal(first, second, facts.num_bytes),
                facts.number,
                Statistics(*row) if facts.number and facts.is_numeric else NO_STATISTICS,
            )
            for facts, (first, second), row in zip(self._facts, sums.tolist(), rows, strict=True)
        ]


class CudaDigests:
    """One batch in flight on a device."""

    def __init__(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        self._batch = batch
        self._results = torch.empty(
            batch.results.shape, dtype=torch.int64, device="cpu", pin_memory=True
        )
        self._results.copy_(batch.results, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_ready(self) -> bool:
        """Whether the results are there."""
        return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())

    def guard(self) -> None:
        """Make the current stream of the device wait for the reading."""
        if not torch.cuda.is_current_stream_capturing():
            with out_of_sight():
                torch.cuda.current_stream(self._batch.device).wait_event(self._event)

    def wait(self) -> None:
        """Wait on the host."""
        self._event.synchronize()

    def results(self) -> list[Result]:
        """Return what was read, once it is ready."""
        with out_of_sight():
            return self._batch.read(self._results)


_streams: dict[torch.device, torch.cuda.Stream] = {}
_kernels: list[ModuleType | None] = []


def start(device: torch.device, tensors: list[torch.Tensor]) -> CudaDigests | None:
    """Begin to read tensors of a device, None while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        kernels = _find_kernels()
        batch = _ran(tensors, device, kernels)
        digests = CudaDigests(batch, stream)
        batch.release(stream)
        return digests


def _ran(tensors: list[torch.Tensor], device: torch.device, kernels: ModuleType | None) -> Batch:
    problems: list[Exception] = []
    with Guard(problems.append):  # whatever a compiler may raise on this machine
        batch = Batch(tensors, device, kernels)
        batch.run()
        return batch
    if kernels is None or isinstance(problems[0], torch.OutOfMemoryError):
        raise problems[0]
    problems.clear()  # it holds all that was to be read
    _kernels[:] = [None]
    return _ran(tensors, device, None)


def _find_kernels() -> ModuleType | None:
    if not _kernels:
        found: list[ModuleType | None] = [None]
        with Guard(lambda _: None):  # missing, or it does not fit this machine
            from distdiag.probes.tensors import digest_kernels

            found = [digest_kernels]
        _kernels.extend(found)
    return _kernels[0]


def _copied_spans(tensor: torch.Tensor, owner: int, address: int) -> Iterator[Span]:
    for start in range(0, tensor.nbytes, _SPAN):
        yield Span(address, min(tensor.nbytes - start, _SPAN), start // ITEM, owner)


def _fill(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[int]:
    """Copy a tensor to the scratch memory; yield each time how many bytes are to be hashed."""
    size = tensor.element_size()
    room = scratch[: scratch.numel() // size * size].view(tensor.dtype)
    span, most, filled = _SPAN // size, ITEM // size, 0
    for piece in pieces(tensor, most):
        # What has more elements than that is contiguous.
        flat = piece.view(-1) if piece.numel() > most else None
        for start in range(0, piece.numel(), most):
            part = piece if flat is None else flat[start : start + most]
            room[filled : filled + part.numel()].view(part.shape).copy_(part)
            filled += part.numel()
            if filled >= span:
                yield _SPAN
                filled -= span
                room[:filled].copy_(room[span : span + filled])
    if filled:
        yield filled * size


def _table(spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row (address, bytes, number, 0) for each item, and whose it is."""
    columns = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 4)
    counts = (columns[:, 1] + ITEM - 1) // ITEM
    address, num_bytes, first_item, owner = columns.repeat_interleave(counts, 0).unbind(1)
    within = torch.arange(address.numel(), device="cpu")
    within -= (counts.cumsum(0) - counts).repeat_interleave(counts)
    sizes = (num_bytes - within * ITEM).clamp(max=ITEM)
    rows = [address + within * ITEM, sizes, first_item + within, torch.zeros_like(within)]
    return torch.stack(rows, 1), owner


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
