"""Read the curves of runs from whatever files hold them: logs, tables, event files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distdiag.metrics.readers.files import (
    MOST_FILES,
    TooManyFilesError,
    files_below,
    is_named_so,
)
from distdiag.metrics.readers.formats import curves_of
from distdiag.metrics.readers.parts_of_runs import put_together
from distdiag.metrics.series import Curves


@dataclass(frozen=True, slots=True)
class Problem:
    """What could not be read: the file, the line (0 if none), and one sentence that says why."""

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
    files: list[Path] = []
    for path in map(Path, paths):
        is_folder = path.is_dir()
        for file in _files(path, problems) if is_folder else [path]:
            found = curves_of(file)
            if is_folder and _is_prose(found.curves):
                continue
            curves += found.curves
            if found.curves:
                files.append(file)
            elif is_folder and not is_named_so(file):
                continue  # a folder holds much that is no log
            elif not found.remarks:
                found.say("holds no curve in a format that is known")
            problems += [Problem(file, line, why) for line, why in found.remarks]
    return Reading(put_together(curves), tuple(problems), tuple(dict.fromkeys(files)))


def _is_prose(curves: Sequence[Curves]) -> bool:
    """Whether all that was found in a text of no known format is one line with a step and a loss.

    A folder holds notes and sources, too; a file that the user names is read whatever it holds.
    """
    sizes = [len(series) for each in curves for series in each.series.values()]
    return bool(sizes) and max(sizes) < 2 and all(each.format == "generic" for each in curves)


def _files(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    try:
        yield from files_below(folder)
    except TooManyFilesError:
        problems.append(
            Problem(folder, 0, f"holds more than {MOST_FILES:,} files: the rest is not read")
        )
    except OSError as error:
        problems.append(Problem(folder, 0, f"cannot be listed: {error.strerror}"))
