"""The report as report.json, the form that other programs read."""

import errno
from pathlib import Path
from typing import ClassVar, Final

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Report
from distdiag.findings.report_json import decode_report, encode_report
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import write_atomically
from distdiag.reports.base import Reporter

LARGEST: Final = 256 << 20
"""A file that is longer, in bytes, is none of ours."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class JsonReporter(Reporter):
    """Write what `distdiag schema` describes."""

    name = "json"
    file_name: ClassVar[str] = "report.json"

    def render(self, report: Report) -> str:
        """Return the text of report.json."""
        return encode_report(report).decode() + "\n"


def read_report(path: Path) -> Report:
    """Read a report.json, or the one of a run directory.

    Raises:
        UsageError: there is none that can be read.
        DamagedFileError: it is not a report.

    """
    file = path / JsonReporter.file_name if path.is_dir() else path
    try:
        return decode_report(read_regular(file, LARGEST))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (DamagedFileError, RecursionError) as error:
        raise DamagedFileError(f"{file}: {error}") from None


def write_report(path: Path, report: Report, *, reserve: Path | None = None) -> None:
    """Replace the file in one step, so that a reader never sees half a report.

    When the disk is full, the file `reserve` is given up for the room that it takes.

    Raises:
        OSError: the file cannot be written; a report that was there before is still whole.

    """
    content = JsonReporter().render(report).encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        if error.errno not in FULL or reserve is None:
            raise
        reserve.unlink(missing_ok=True)
        write_atomically(path, content)
