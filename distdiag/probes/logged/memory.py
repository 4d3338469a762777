"""How much memory the process holds at the end of steps, and how many graphs of earlier ones."""

from __future__ import annotations

import weakref
from collections import deque
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch

from distdiag.events.logged import MOST_MARKED, MemoryUse
from distdiag.probes.base import Probe
from distdiag.probes.compiled_passes import is_compiled_pass
from distdiag.probes.guard import guarded
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

EVERY: Final = 8
"""Steps between two samples."""
_MARK: Final = "distdiag_alive"
"""The name of a mark among the metadata of a node, which live as long as the node."""
_GROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""The limit of a container and what is in use, as both versions of cgroups show them in it."""


class _Mark:
    """Lives as long as the graph of the loss that it is fastened to."""

    __slots__ = ("__weakref__",)


class StepMemory(Probe):
    """Reads the memory of the process after every eighth step: a few small files of the kernel."""

    name: ClassVar[str] = "step-memory"

    def __init__(self, recorder: Recorder, started: Signal[object], ended: Signal[[]]) -> None:
        super().__init__(recorder)
        self._started, self._ended = started, ended
        self._marks: deque[weakref.ref[_Mark]] = deque(maxlen=MOST_MARKED)
        self._marked = -1

    def _install(self) -> None:
        self._subscribe(self._started, self._before_backward)
        self._subscribe(self._ended, self._step_ended)

    def _before_backward(self, outputs: object) -> None:
        step = self.recorder.step
        if step % EVERY == 0 and step != self._marked:
            self._marked = step
            self._mark(outputs)

    @guarded
    def _mark(self, outputs: object) -> None:
        loss = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        if type(loss) is torch.Tensor and loss.grad_fn is not None and not is_compiled_pass():
            mark = _Mark()
            node: Untyped = loss.grad_fn
            node.metadata[_MARK] = mark
            self._marks.append(weakref.ref(mark))

    def _step_ended(self) -> None:
        if self.recorder.step % EVERY == 0:
            self._look()

    @guarded
    def _look(self) -> None:
        held = held_bytes()
        self.recorder.event(
            MemoryUse,
            memory="host",
            used_bytes=held.used,
            limit_bytes=held.used + available_bytes(),
            reserved_bytes=held.reserved,
            num_batches=self.recorder.num_batches,
            num_graphs=self._num_graphs(),
        )
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._note_gpu()

    def _note_gpu(self) -> None:
        """Read the counters of torch's allocator, which are on the host."""
        if torch.cuda.is_current_stream_capturing():
            return
        device = torch.cuda.current_device()
        self.recorder.event(
            MemoryUse,
            memory="gpu",
            used_bytes=torch.cuda.memory_allocated(device),
            limit_bytes=torch.cuda.get_device_properties(device).total_memory,
            device=device,
            reserved_bytes=torch.cuda.memory_reserved(device),
            peak_bytes=torch.cuda.max_memory_allocated(device),
            num_batches=self.recorder.num_batches,
            num_graphs=self._num_graphs(),
        )

    def _num_graphs(self) -> int:
        return sum(mark() is not None for mark in self._marks)


class Held(NamedTuple):
    """What a process holds, in bytes, without the pages of files that the kernel can take back."""

    used: int
    reserved: int


def held_bytes() -> Held:
    """Return the pages that the process alone fills, and what it has asked for, used or not."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    sizes = {
        name: int(rest.split()[0]) << 10
        for name, _, rest in (line.partition(":") for line in lines)
        if name in ("RssAnon", "RssShmem", "VmData", "VmRSS")
    }
    shared = sizes.get("RssShmem", 0)
    used = sizes["RssAnon"] + shared if "RssAnon" in sizes else sizes["VmRSS"]
    return Held(used, sizes["VmData"] + shared)


def available_bytes() -> int:
    """Return what the machine, or the container if that has less, can still give."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    available = int(sizes["MemAvailable"].split()[0]) << 10
    for limit, used in _GROUPS:
        numbers = [_number(limit), _number(used)]
        if numbers[0] is not None and numbers[1] is not None:
            available = min(available, max(numbers[0] - numbers[1], 0))
    return available


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
