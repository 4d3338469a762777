"""Files as other programs want them: relative to the root of the sources, with forward slashes."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from distdiag.findings.finding import Finding, Location, Report

LONGEST: Final = 4096
"""Linux takes no longer path, in bytes."""


def source_roots(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that sources may be given relative to: the workspace, else this folder."""
    workspace = environ.get("GITHUB_WORKSPACE")
    named = [Path(workspace)] if workspace else []
    return tuple(folder.absolute() for folder in (*named, Path.cwd()))


def relative_path(file: str) -> str:
    """Return the path of a source file below the workspace or the working directory.

    A file that is elsewhere keeps its path. Bytes that are no UTF-8 are spelled out.
    """
    file = file[:LONGEST]
    path = PurePosixPath(os.path.normpath(file)) if file else PurePosixPath()
    for root in source_roots(os.environ):
        if path.is_absolute() and path.is_relative_to(root):
            path = path.relative_to(root)
            break
    return str(path).encode("utf-8", "backslashreplace").decode()


def place_of(finding: Finding) -> Location | None:
    """Return where a finding is, or else the first place that its evidence names."""
    places = (entry.location for entry in finding.evidence)
    return finding.location or next((place for place in places if place is not None), None)


def script_of(report: Report) -> str:
    """Return the Python file that a run was started with; "" if the command names none."""
    return next((word for word in report.run.command if word.endswith(".py")), "")
