"""Folders that hold the dumps of several jobs, which are analysed one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

JOB_PREFIX: Final = "job-"
"""``distdiag dump --out`` puts each of several jobs into a folder that begins so."""


def split_jobs(paths: Sequence[Path]) -> tuple[tuple[Path, ...], ...]:
    """Return the paths of each job; all paths together where they are not known to be of several.

    A folder of several jobs has two or more folders ``job-…`` in it. What lies beside them is of
    no known job, and analysed by itself.
    """
    jobs = [job for path in paths for job in _jobs_in(path)]
    if len(jobs) < 2:
        return (tuple(paths),)
    split = {job.parent for job in jobs}
    rest = [path for path in paths if path not in split]
    rest += [
        path for parent in sorted(split) for path in sorted(parent.iterdir()) if path not in jobs
    ]
    return tuple((job,) for job in jobs) + ((tuple(rest),) if rest else ())


def _jobs_in(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    jobs = [path for path in sorted(folder.glob(f"{JOB_PREFIX}*")) if path.is_dir()]
    if len(jobs) > 1 and all(any(job.glob("rank-*.py-spy.json")) for job in jobs):
        yield from jobs
