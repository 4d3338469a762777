"""DeepSpeed: progress, throughput, timers and the loss scale that an overflow leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, fields, number_in, pairs, scaled

# ``step=10, skipped=0, lr=[1e-05, 1e-05], mom=[(0.9, 0.999)]``
_PROGRESS: Final = re.compile(
    r"\bstep=(\d{1,12}+), skipped=(\d{1,12}+), lr=\[([^\]]{0,2000})\](?:, mom=\[([^\]]{0,2000})\])?"
)
# ``steps: 10 loss: 5.6123 iter time (s): 0.312 samples/sec: 51.2``
_PIPELINE: Final = re.compile(r"\bsteps: (\d{1,12}+) loss: ")
_ITERATION_TIME: Final = re.compile(rf"iter time \(s\): ({NUMBER})")
# ``epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.3, MemAllocated=1.2GB``
_THROUGHPUT: Final = re.compile(r"\bepoch=\d{1,9}+/micro_step=\d{1,12}+/global_step=(\d{1,12}+), ")
# ``[Rank 0] time (ms) | fwd: 1.20 | bwd: 3.40``, and ``rank=0 time (ms) | ...`` before
_TIMERS: Final = re.compile(r"\btime \(ms\) ?\|")
# ``OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768``
_OVERFLOW: Final = re.compile(
    rf"OVERFLOW! Rank (\d{{1,6}}+) Skipping step\. Attempted loss scale: ({NUMBER})"
)


def _read(line: str) -> Parsed | None:
    if match := _PROGRESS.search(line):
        values = dict(_lists(("lr", match[3]), ("mom", match[4] or "")))
        values["skipped"] = float(match[2])
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _PIPELINE.search(line):
        values = named(pairs(line[match.start() :]))
        values.pop("steps", None)
        if time := _ITERATION_TIME.search(line, match.end()):
            values["iter time (s)"] = scaled(time[1], None)
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _THROUGHPUT.search(line):
        values = named(pairs(line[match.end() :]))
        return Parsed(values, match.start(), step=float(match[1]))
    if match := _TIMERS.search(line):
        timers = ((f"{name} (ms)", ms) for name, ms in fields(line[match.end() :], "|"))
        return Parsed(named(timers, "time "), match.start())
    if match := _OVERFLOW.search(line):
        return Parsed(
            {"loss scale": float(match[2].replace(",", ""))}, match.start(), rank=int(match[1])
        )
    return None


def _lists(*lists: tuple[str, str]) -> Iterator[tuple[str, float]]:
    """Yield the first number of each list by its name, and other rates with their place."""
    for name, text in lists:
        numbers = [number_in(part.strip(" ()")) for part in text.split(",")]
        known = [number for number in numbers if number is not None]
        for place, number in enumerate(known[:64]):
            if place == 0 or (number != known[0] and name == "lr"):
                yield (f"{name}[{place}]" if place else name), number


DEEPSPEED: Final = LineFormat(
    "deepspeed",
    (b", skipped=", b"iter time (s):", b"SamplesPerSec=", b"time (ms)", b"OVERFLOW! Rank"),
    _read,
)
