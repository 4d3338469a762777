"""Find the reports of runs below a folder."""

from pathlib import Path
from typing import Final

from distdiag.events.errors import UsageError
from distdiag.record.runs_folder import RUNS_FOLDER

NAME: Final = "report.json"
_DEPTHS: Final = ("*", "*/*")
"""A command that makes several runs keeps them in one folder below that of all runs."""


def newest_run() -> Path:
    """Return the run directory below ./distdiag-runs whose report was written last.

    Raises:
        UsageError: there is none.

    """
    runs = runs_below(Path(RUNS_FOLDER))
    if not runs:
        raise UsageError(f"there is no run below ./{RUNS_FOLDER}: name a run directory")
    return runs[-1]


def runs_below(folder: Path) -> tuple[Path, ...]:
    """Return the run directories below a folder, the newest last; none if it is one itself."""
    if not folder.is_dir() or (folder / NAME).exists() or (folder / "run.json").exists():
        return ()
    reports = [path for depth in _DEPTHS for path in folder.glob(f"{depth}/{NAME}")]
    times = sorted((path.stat().st_mtime_ns, path) for path in reports)
    return tuple(path.parent for _, path in times)
