"""Read the curves of runs from whatever files hold them: logs, tables, event files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distdiag.metrics.readers.files import files_below
from distdiag.metrics.readers.formats import curves_of
from distdiag.metrics.series import Curves


@dataclass(frozen=True, slots=True)
class Problem:
    """What could not be read: the file, the line (0 if it is none), and one sentence that says why."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.why}"


@dataclass(frozen=True, slots=True)
class Reading:
    """The curves that were found, what could not be read, and the files in which curves were."""

    curves: tuple[Curves, ...]
    problems: tuple[Problem, ...] = ()
    files: tuple[Path, ...] = ()


def read(paths: Iterable[str | Path]) -> Reading:
    """Read files and folders; whatever is wrong with one of them, the others are read.

    A folder is searched for all that may hold curves. Each pair of rank and attempt of each source
    has its own `Curves`.
    """
    problems: list[Problem] = []
    curves: list[Curves] = []
    for path in map(Path, paths):
        is_folder = path.is_dir()
        for file in files_below(path) if is_folder else [path]:
            found = curves_of(file)
            curves += found.curves
            if found.curves or not is_folder:
                problems += [Problem(file, line, why) for line, why in found.remarks]
                if not found.curves and not found.remarks:
                    problems.append(Problem(file, 0, "holds no curve in a format that is known"))
    files = dict.fromkeys(each.source for each in curves)
    return Reading(tuple(curves), tuple(problems), tuple(files))
