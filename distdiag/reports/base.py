"""The contract of a reporter, and how findings and ranks are said in few words."""

from pathlib import Path
from typing import ClassVar, Final

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Report
from distdiag.record.visible import visible

LONGEST_LINE: Final = 600
"""One line of a finding on stderr is cut here, in characters."""


class Reporter:
    """Turn a report into text. It computes nothing that the report does not say.

    `name` is the name of the module and the word for ``--report``. `file_name` is the file below
    the run directory that holds the text, or None when it goes to stderr. `quiet` asks a form for
    people for errors only. `run_dir` is where the events of the run are, for forms that show them;
    None where there are none. `traces` are files of torch's profiler for forms that show them.
    `is_slow`: to make it may take seconds, for which nobody should have to wait.
    """

    name: ClassVar[str]
    file_name: ClassVar[str | None] = None
    is_slow: ClassVar[bool] = False

    def __init__(
        self,
        *,
        width: int = 80,
        color: bool = False,
        verbose: bool = False,
        quiet: bool = False,
        run_dir: Path | None = None,
        traces: tuple[Path, ...] = (),
    ) -> None:
        self.width = width
        self.color = color
        self.verbose = verbose
        self.quiet = quiet
        self.run_dir = run_dir
        self.traces = traces

    def render(self, report: Report) -> str:
        """Return the text, which ends with a newline.

        Raises:
            UsageError: the run directory does not hold what this form shows.

        """
        raise NotImplementedError

    def append(self, report: Report) -> tuple[Path, str] | None:
        """Return a file outside of the run directory, and what to append to it, if there is one."""
        return None


def append_to_its_file(reporter: Reporter, report: Report) -> None:
    """Write what a form appends to a file outside of the run directory.

    Raises:
        OSError: that file cannot be written.

    """
    appended = reporter.append(report)
    if appended is not None:
        path, text = appended
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def tool_version() -> str:
    """Return the version of distdiag, or "" where it is not installed."""
    # Not above: every rank loads this module, and that one loads many others.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("distdiag")
    except PackageNotFoundError:
        return ""


def one_line(finding: Finding) -> str:
    """Return the line that goes to stderr when a finding is made.

    Example: ``distdiag: error COL003 collective-shape-mismatch train.py:41 ranks 3: all_gather …``
    """
    parts = ["distdiag:", finding.severity, finding.code, finding.name]
    if finding.location:
        parts.append(str(finding.location))
    if finding.ranks:
        parts.append(f"ranks {short(finding.ranks)}")
    head = visible(cut(" ".join(parts), LONGEST_LINE))
    message = visible(cut(" ".join(finding.message.split()), LONGEST_LINE))
    return cut(f"{head}: {message}", LONGEST_LINE)


def cut(text: str, length: int) -> str:
    """Return the text, or its beginning and an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def phrase(ranks: RankSet) -> str:
    """Return ``rank 3`` or ``ranks 0-2,7``, shortened where they are too many."""
    return f"rank {ranks}" if len(ranks) == 1 else f"ranks {short(ranks)}"


def short(ranks: RankSet, length: int = 48) -> str:
    """Return the ranks; where they are too many, the first of them and their number."""
    text = str(ranks)
    if len(text) <= length:
        return text
    shown = text[:length].rpartition(",")[0]
    return f"{shown},… ({len(ranks)} ranks)"
