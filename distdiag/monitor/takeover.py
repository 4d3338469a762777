"""What a monitor takes over from the one that watched this attempt before it and died."""

import logging
from collections.abc import Iterator

from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, Stacks
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.report_json import decode_report
from distdiag.record.run_dir import RunDir
from distdiag.record.wire import Interner
from distdiag.transports.journal import read_journal

_log = logging.getLogger(__name__)


class Takeover:
    """The lines that it has said, the stacks that it took, and how it ended."""

    def __init__(self, run_dir: RunDir, deaths: tuple[str, ...]) -> None:
        """`deaths` is what befell the monitors before; without any there is nothing to take."""
        self.deaths = deaths
        self._run_dir = run_dir
        for death in deaths:
            _log.warning("the monitor %s, and was started again", death)

    def reported(self) -> tuple[Finding, ...]:
        """Return the findings of which the user knows already."""
        try:
            return decode_report(self._run_dir.report.read_bytes()).findings if self.deaths else ()
        except (OSError, DamagedFileError):
            return ()

    def seen(self, interner: Interner) -> Iterator[Event]:
        """Yield what was seen from outside and cannot be seen again."""
        if not self.deaths:
            return
        try:
            for event in read_journal(self._run_dir.journal, interner):
                if isinstance(event, Stacks | Observed):
                    yield event
        except (OSError, DamagedFileError) as error:
            _log.warning("what the monitor before this one saw cannot be read: %s", error)

    def findings(self) -> tuple[Finding, ...]:
        """Say in the report what befell the monitors before this one."""
        if not self.deaths:
            return ()
        what = f"the monitor {', then '.join(self.deaths)}"
        finding = Finding(
            code="DIA001",
            name="crashed-check",
            severity=Severity.INFO,
            grade=Grade.NOTE,
            confidence=1.0,
            message=f"{what}, and was started again: it has read all records from the beginning",
            ranks=RankSet(),
            evidence=(Evidence(ranks=RankSet(), summary=what),),
            subjects=("restarted monitor",),
            why="Somebody killed it, or the kernel did because memory ran out (see `dmesg`).",
            fix="Unless it was done on purpose, leave some 200 MB of memory for the monitor.",
            fix_leaves="Meanwhile no stacks were taken, and no hang would have been seen.",
            disproof="The monitor's log names no such end.",
        )
        return (finding,)
