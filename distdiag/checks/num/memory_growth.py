"""NUM042: memory grows with each step, and will not suffice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.logged import MemoryUse
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import MemoryView

LEAST_STEPS: Final = 200
LEAST_SAMPLES: Final = 16
PARTS: Final = 8
STEADY: Final = 0.5
"""Each part of the run grows by at least so much of the mean growth of a part: a cache that fills
up, or an allocator that finds its size, grows less and less."""
LEAST_BYTES: Final = 32 << 20
"""Less is what the heap of a program and its libraries may need more or less from time to time."""
FAR: Final = 100
"""A limit that is a hundred times as many steps away as were observed may never be reached."""
_MIB: Final = 1 << 20


class MemoryGrowth(Check[MemoryView]):
    """Memory grows with each step, and will not suffice.

    ## What you see
    After hours the kernel kills the rank, or torch runs out of memory. The program keeps something
    from each step, often a list of losses with their graphs.

    ## Example
        losses.append(loss)            # wrong: keeps the graph, and on it all activations
        losses.append(loss.detach())   # right

    ## How to fix
    Store `loss.item()` or `loss.detach()` instead of `loss`. If that is not it, look for lists,
    dictionaries and caches that grow with each step; on a GPU,
    `torch.cuda.memory._record_memory_history()` shows where the kept memory was allocated.

    Changes: Memory stays the same from step to step.

    Leaves: The results of each step.

    ## When it is not a defect
    What is kept has an end before the memory has: a cache of the data set, experience that is
    collected until a buffer is full, or a run that is short. It is a warning only where graphs of
    earlier losses are kept, or where loaders have read all of their data before; memory that was
    asked for at once and is filled little by little does not count, and no pages of files do.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/faq.html
    """

    code = "NUM042"
    name = "memory-growth"
    severity = Severity.WARNING

    def check(self, view: MemoryView) -> Iterator[Finding]:
        """Look at the last three quarters of the samples of each rank."""
        found: dict[int, Growth] = {}
        is_known = True
        for rank, samples in view.by_rank.items():
            growth = growth_of(samples, view.first_passes.get(rank, 0))
            if growth is not None and growth.num_left < FAR * samples[-1].step:
                found[rank] = growth
                # A data set that is kept in memory as it is read grows until it was read once, and
                # nothing tells when a program that makes its own data has enough of them.
                is_known &= rank in view.first_passes or growth.last.num_graphs >= LEAST_SAMPLES
        if not found:
            return
        rank, worst = min(found.items(), key=lambda item: item[1].num_left)
        where = "of tensors on the GPU" if view.memory == "gpu" else "of the process"
        yield self.finding(
            f"the memory {where} grows by {worst.per_step / _MIB:.2f} MiB with each step, and will "
            f"not suffice for {worst.num_left:.0f} more steps",
            ranks=RankSet(found),
            step=worst.last.step,
            subjects=(view.memory,),
            grade=Grade.LIKELY if is_known else Grade.NOTE,
            confidence=0.8 if is_known else 0.5,
            evidence=tuple(
                Evidence(ranks=RankSet([each]), summary=growth.summary, values=growth.values)
                for each, growth in sorted(found.items())
            ),
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """A steady growth in bytes, from the first sample that counts to the last."""

    first: MemoryUse
    last: MemoryUse
    per_step: float

    @property
    def num_left(self) -> float:
        """How many more steps there is memory for."""
        return max(self.last.limit_bytes - self.last.used_bytes, 0) / self.per_step

    @property
    def summary(self) -> str:
        """Say from what to what it grew."""
        kept = f"; graphs of {self.last.num_graphs} of the losses that were looked at are kept"
        return (
            f"{self.first.used_bytes / _MIB:.0f} MiB after step {self.first.step}, "
            f"{self.last.used_bytes / _MIB:.0f} MiB after step {self.last.step}, of "
            f"{self.last.limit_bytes / _MIB:.0f} MiB that it may have"
            + kept
            * (self.last.num_graphs >= LEAST_SAMPLES)
        )

    @property
    def values(self) -> dict[str, str | int | float | bool | None]:
        """Return what was measured last."""
        return {
            "bytes_per_step": round(self.per_step),
            "steps_left": round(self.num_left),
            "reserved_bytes": self.last.reserved_bytes,
            "peak_bytes": self.last.peak_bytes,
        }


def growth_of(samples: Sequence[MemoryUse], settled_at: int) -> Growth | None:
    """Return the growth after the first quarter of the steps, if it is steady and large."""
    if not samples:
        return None
    begin = max(samples[0].step + (samples[-1].step - samples[0].step) // 4, settled_at)
    kept = [sample for sample in samples if sample.step >= begin]
    if len(kept) < LEAST_SAMPLES or kept[-1].step - kept[0].step < LEAST_STEPS:
        return None
    size = len(kept) // PARTS
    parts = [median(s.used_bytes for s in kept[n * size : (n + 1) * size]) for n in range(PARTS)]
    differences = [later - earlier for earlier, later in pairwise(parts)]
    mean = (parts[-1] - parts[0]) / len(differences)
    grown = kept[-1].used_bytes - kept[0].used_bytes
    if grown < LEAST_BYTES or min(differences) < STEADY * mean or _is_filled(kept, grown):
        return None
    return Growth(kept[0], kept[-1], grown / (kept[-1].step - kept[0].step))


def _is_filled(samples: Sequence[MemoryUse], grown: int) -> bool:
    """Say whether a process fills what it has asked for before, and may have all of it."""
    first, last = samples[0], samples[-1]
    if last.memory != "host" or not first.reserved_bytes:
        return False
    asked = last.reserved_bytes - first.reserved_bytes
    return asked < STEADY * grown and last.reserved_bytes <= last.limit_bytes
