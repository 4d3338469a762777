"""Turns the collectives of a run, up to where its ranks part, into a small test."""

from pathlib import Path

from distdiag.replay.calls import find_calls
from distdiag.replay.source import test_source
from distdiag.reports import read_report

__all__ = ["replay_source"]


def replay_source(path: Path) -> str:
    """Return the source of a test that makes the calls of a run again.

    `path` is a run directory, or the report.json in it.

    Raises:
        UsageError: there is nothing to be replayed, with the reason.
        DamagedFileError: the report is none.

    """
    report = read_report(path)
    return test_source(find_calls(path if path.is_dir() else path.parent, report))
