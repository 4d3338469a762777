"""Keeps what a failed test left behind: one folder for each test, by its name."""

import hashlib
import re
from pathlib import Path
from typing import Final

import pytest

from distdiag.reports import load_reporter, write_report
from distdiag.testing.outcome import Outcome
from distdiag.testing.run import Ended

LONGEST_NAME: Final = 200
"""Characters in the name of a folder; common file systems take 255 bytes."""

_UNUSUAL: Final = re.compile(r"[^\w.\[\]=+,-]+", re.ASCII)


def folder_name(nodeid: str) -> str:
    """Return a name for the folder of a test, another one for each test.

    The file and the function are joined by two hyphens, folders by one. Where more than that had
    to be changed, a hash of the whole name is added.
    """
    plain = nodeid.replace("::", "--").replace("/", "-")
    name = _UNUSUAL.sub("_", plain)[:LONGEST_NAME]
    if name == plain:
        return name
    return f"{name}-{hashlib.sha1(nodeid.encode(), usedforsecurity=False).hexdigest()[:8]}"


def keep_failure(item: pytest.Function, ended: Ended, outcome: Outcome) -> None:
    """Keep what is known of a failed test, if the user named a folder for that."""
    root = item.config.getoption("distdiag_report_dir", None)
    if not root or outcome.kind != "failed":
        return
    folder = Path(root, folder_name(item.nodeid))
    try:
        _write(folder, ended, outcome)
    except OSError as error:
        item.add_report_section("call", "distdiag report", f"it cannot be kept: {error}")
    else:
        item.add_report_section("call", "distdiag report", str(folder))


def _write(folder: Path, ended: Ended, outcome: Outcome) -> None:
    """Write what is known of a failed test into a folder.

    report.json   what distdiag observed; `distdiag report FOLDER` shows it
    report.txt    the same as text
    failure.txt   what pytest shows
    rank-N.log    what rank N wrote to stdout and stderr

    Raises:
        OSError: one of them cannot be written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    report = ended.early or ended.report
    if report is not None:
        write_report(folder / "report.json", report)
        text = load_reporter("terminal")().render(report)
        (folder / "report.txt").write_text(text, encoding="utf-8")
    (folder / "failure.txt").write_text(f"{outcome.failures}\n", encoding="utf-8")
    for rank, output in ended.outputs.items():
        (folder / f"rank-{rank}.log").write_text(output, encoding="utf-8")
