#!/usr/bin/env python3
"""Say how much memory a run takes by its log: the peak, the growth, and when it would be full.

    python scripts/profile_memory.py LOG... [--limit 80]

The limit is in the unit of the log (GiB in torchtitan's). Exits with 1 if memory grows, with 2 if
no log holds a series of memory.
"""

from __future__ import annotations

import argparse
import sys

from distdiag.metrics.judging.observation import spell_step, spell_value
from distdiag.metrics.memory import MemoryUse, memory_use
from distdiag.metrics.reading import read
from distdiag.metrics.runs import runs_of


def main() -> int:
    """Print one paragraph for each rank and attempt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--limit", type=float, help="what the device holds, in the log's unit")
    given = parser.parse_args()
    reading = read(given.logs)
    for problem in reading.problems:
        print(problem, file=sys.stderr)
    tracks = [track for run in runs_of(reading.curves) for track in run.tracks("memory")]
    uses = [use for track in tracks if (use := memory_use(track, given.limit)) is not None]
    if not uses:
        print("no series of memory was found", file=sys.stderr)
        return 2
    for use in uses:
        print(describe(use))
    return int(any(use.growth > 0 for use in uses))


def describe(use: MemoryUse) -> str:
    """Return what to know of the memory of one rank."""
    who = f", {use.ranks.phrase()}" if use.ranks else ""
    lines = [
        f"{use.run}{who}: {use.series}",
        f"  peak    {spell_value(use.peak)} at step {spell_step(use.peak_at.step)} "
        f"({use.peak_at.file}:{use.peak_at.line})",
        f"  end     {spell_value(use.last)}",
    ]
    if use.growth > 0:
        lines.append(f"  growth  {spell_value(1000 * use.growth)} in 1,000 steps, steadily")
    else:
        lines.append("  growth  none beyond its noise")
    if use.full_at is not None and use.limit is not None:
        limit = spell_value(use.limit)
        lines.append(f"  full    at step {use.full_at:.0f} if it goes on so (limit: {limit})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
