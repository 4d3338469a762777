"""How many runs of a comparison fit on this machine at the same time."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
