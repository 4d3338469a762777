"""How much memory the process holds at the end of steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Final

import torch

from distdiag.events.logged import MemoryUse
from distdiag.probes.base import Probe
from distdiag.probes.guard import guarded
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

EVERY: Final = 8
"""Steps between two samples."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_GROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""The limit of a container and what is in use, as both versions of cgroups show them in it."""


class StepMemory(Probe):
    """Reads the memory of the process after every eighth step: a few small files of the kernel."""

    name: ClassVar[str] = "step-memory"

    def __init__(self, recorder: Recorder, ended: Signal[[]]) -> None:
        super().__init__(recorder)
        self._ended = ended

    def _install(self) -> None:
        self._subscribe(self._ended, self._step_ended)

    def _step_ended(self) -> None:
        if self.recorder.step % EVERY == 0:
            self._look()

    @guarded
    def _look(self) -> None:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
        used = int(pages[1]) * _PAGE
        self.recorder.event(
            MemoryUse,
            memory="host",
            used_bytes=used,
            limit_bytes=used + available_bytes(),
            num_batches=self.recorder.num_batches,
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
        )


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
