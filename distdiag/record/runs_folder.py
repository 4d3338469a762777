"""The folder in which runs lie that were given none, and how many of them stay."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from distdiag.record.private_file import create_private
from distdiag.record.regular_file import read_regular

RUNS_FOLDER: Final = "distdiag-runs"
KEPT_RUNS: Final = 20
"""A working day of trying things out; a run takes some MiB, a long one at most 64 for a rank."""
_NAME: Final = re.compile(r"\d{8}-\d{6}-\d+")
_NOT_YET_S: Final = 60.0
"""A run that was changed so recently may still be going on, whatever its files say."""


def name_of_run(started_s: float, pid: int) -> str:
    """Return the name of the folder of a run that began at a time, by a process."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_s))}-{pid}"


def tidy(folder: Path, kept: int) -> None:
    """Keep git away from a folder of runs, and remove all but the newest runs that have ended.

    Nothing else in the folder is touched, and what cannot be done is left.
    """
    with suppress(OSError):
        descriptor = create_private(folder / ".gitignore", os.O_WRONLY)
        try:
            os.write(descriptor, b"*\n")
        finally:
            os.close(descriptor)
    with suppress(OSError):
        runs = sorted(path for path in folder.iterdir() if _is_run(path))
        for path in runs[: max(0, len(runs) - kept)]:
            if _has_ended(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_run(path: Path) -> bool:
    is_folder = path.is_dir() and not path.is_symlink()
    return _NAME.fullmatch(path.name) is not None and is_folder and (path / "run.json").is_file()


def _has_ended(path: Path) -> bool:
    """Say whether no monitor of a run lives here, and nobody has written to it lately."""
    for pid_file in path.glob("attempt-*/monitor.pid"):
        try:
            os.kill(int(read_regular(pid_file)), 0)
        except (OSError, ValueError):
            continue
        return False
    return time.time() - path.stat().st_mtime > _NOT_YET_S
