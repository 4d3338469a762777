"""Where the ranks of a test stand when its time is up, and what their stacks alone tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from distdiag.errors import UsageError
from distdiag.finding import Report
from distdiag.live.job_dump import jobs_of, take_dump
from distdiag.live.ranks import ranks_of_pids
from distdiag.live.text import job_text
from distdiag.live.verdict import judge

STACKS_S: Final = 5.0


class Stacks(NamedTuple):
    """The stacks of ranks as text, and the verdict of the checks that need nothing else."""

    ranks: frozenset[int]
    text: str
    verdict: Report | None = None


def take_stacks(pids: Mapping[int, int]) -> Stacks:
    """Take the Python stacks of all ranks that still run."""
    ranks = frozenset(pids)
    try:
        found = ranks_of_pids(list(pids.values()))
    except UsageError as error:
        return Stacks(ranks, f"no stacks could be taken: {error}\n")
    jobs = jobs_of([take_dump(found, timeout_s=STACKS_S, say=lambda _: None)])
    if not jobs:
        return Stacks(ranks, "all ranks had ended before their stacks could be taken\n")
    return Stacks(ranks, job_text(jobs[0]), judge(jobs[0]))
