"""A folder of dumps, one file for each rank, for other tools and for a later look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

import msgspec

from distdiag.errors import UsageError
from distdiag.event import ThreadStack
from distdiag.live.job_dump import JobDump
from distdiag.private_file import make_private_folder
from distdiag.run_dir import write_atomically

_UNSAFE: Final = re.compile(r"[^\w-]")


def prepare(folder: Path) -> None:
    """Make the folder before anything else is done.

    Raises:
        UsageError: it cannot be made, or holds something already.

    """
    try:
        make_private_folder(folder)
        if any(folder.iterdir()):
            raise UsageError(f"folder {folder} is not empty: dumps of two moments would mix")
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be written: {error.strerror}") from None


def save(jobs: Sequence[JobDump], folder: Path) -> int:
    """Write the stacks of each rank that has any; return the number of files.

    A file ``rank-3.py-spy.json`` has the form of ``py-spy dump --json``. Several jobs have a folder
    each. Files are readable by the owner only.

    Raises:
        UsageError: the folder cannot be written.

    """
    num_files = 0
    try:
        for job in jobs:
            place = folder / f"job-{_UNSAFE.sub('_', job.job)}" if len(jobs) > 1 else folder
            make_private_folder(place)
            for rank, stacks in job.ranks.items():
                if stacks.threads:
                    threads = [_spy_thread(thread, stacks.who.pid) for thread in stacks.threads]
                    text = msgspec.json.format(msgspec.json.encode(threads), indent=2)
                    write_atomically(place / f"rank-{rank}.py-spy.json", text + b"\n")
                    num_files += 1
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be written: {error.strerror}") from None
    return num_files


def _spy_thread(thread: ThreadStack, pid: int) -> dict[str, object]:
    return {
        "pid": pid,
        "thread_id": None,
        "thread_name": thread.name,
        "os_thread_id": None,
        "active": thread.active,
        "owns_gil": thread.holds_gil,
        "frames": [
            {
                "name": frame.function,
                "filename": frame.file,
                "module": None,
                "short_filename": PurePath(frame.file).name,
                "line": frame.line,
                "locals": None,
            }
            for frame in thread.frames
        ],
        "process_info": None,
    }
