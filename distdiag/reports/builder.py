"""Builds the one report of a run, keeps it on disk while the run goes on, and gives the verdict."""

import logging
import platform
import sys
import traceback
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from distdiag.config import Config
from distdiag.engine.rank_status import RankStatuses
from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.events.lifecycle import TorchLoaded
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Grade,
    RankInfo,
    Report,
    Run,
    Severity,
)
from distdiag.findings.report_json import decode_report
from distdiag.record.exception_text import LONGEST_TRACEBACK, shortened
from distdiag.record.private_file import RESERVE_BYTES, set_aside
from distdiag.record.redaction import redacted
from distdiag.record.run_dir import LaunchFile, RunDir, Verdict, write_atomically
from distdiag.record.visible import visible
from distdiag.reports import load_reporter, one_line, write_report
from distdiag.reports.base import Reporter, append_to_its_file
from distdiag.reports.formats.json import FULL
from distdiag.reports.gate import gate_of, hint, script_status
from distdiag.reports.surface import surface_of
from distdiag.views.rank_states import RankState, RankStatus, last_act

_log = logging.getLogger(__name__)


class RunReporter:
    """The report of one run, kept on the node of rank 0.

    `lost` are ranks that are not observed any more, `problem` is why others never were.
    `unobserved` are ranks of the job that nobody reported when it began.
    """

    def __init__(
        self, run_dir: RunDir, launch_file: LaunchFile, config: Config, rank_status: RankStatuses
    ) -> None:
        self.rank_status = rank_status
        self.pids: Mapping[int, int] = {}
        self.lost = RankSet()
        self.unobserved = RankSet()
        self.problem = ""
        self.dump_transport = ""
        self._run_dir = run_dir
        self._launch_file = launch_file
        self._config = config
        self.gate = gate_of(config)
        # Imported now, while the ranks are busy importing too: at the end somebody waits.
        self._forms = [load_reporter(name) for name in config.report]
        self._path = run_dir.report
        self._earlier = self._read_earlier()
        self._torch = self._earlier.run.torch if self._earlier else ""
        set_aside(run_dir.reserve, RESERVE_BYTES)

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, TorchLoaded):
            self._torch = event.torch

    def build(
        self,
        findings: Iterable[Finding],
        states: Mapping[int, RankState],
        *,
        checks: tuple[str, ...],
        not_checked: Mapping[str, str],
        complete: bool = False,
    ) -> Report:
        """Return the report as it stands; `checks` are the codes of those that judged the run."""
        gaps = {**self._gaps(states), **not_checked}
        earlier = self._earlier
        before = (*earlier.findings, *(i.finding for i in earlier.ignored)) if earlier else ()
        found = {finding.identity: finding for finding in before}
        found |= {finding.identity: finding for finding in findings}
        report = Report(
            complete=complete,
            run=self._run(states, complete=complete),
            findings=tuple(found.values()),
            checked=tuple(code for code in checks if code not in gaps),
            not_checked=gaps,
            silent_ranks=RankSet(
                {*self.unobserved, *(r for r, s in states.items() if s.status is RankStatus.SILENT)}
            ),
        )
        return self.gate.judged(report)

    def write(self, report: Report) -> None:
        """Replace report.json, on a full disk in the room that was set aside."""
        try:
            write_report(self._path, report, reserve=self._run_dir.reserve)
        except OSError:
            _log.exception("the report could not be written")
        if not (report.complete or self._run_dir.reserve.exists()):
            set_aside(self._run_dir.reserve, RESERVE_BYTES // 2)

    def show(self, report: Report, *, slow: bool = False) -> None:
        """Write the other forms of the report that were asked for, to stderr or to their files.

        They are those that take no time, or the `slow` ones.
        """
        for kind in (kind for kind in self._forms if kind.is_slow is slow):
            try:
                self._show_as(kind, report)
            except (OSError, UsageError, DamagedFileError) as error:
                _log.exception("the form %s of the report could not be made", kind.name)
                say(f"distdiag: --report {kind.name}: {visible(str(error))}\n")
        if not (self._config.quiet or slow):
            say(hint(report))

    def _show_as(self, kind: type[Reporter], report: Report) -> None:
        surface = surface_of(sys.stderr)
        reporter = kind(
            width=surface.width,
            color=surface.color,
            verbose=self._config.verbose,
            quiet=self._config.quiet,
            run_dir=self._run_dir.root,
        )
        path = self._run_dir.root / (reporter.file_name or "")
        if reporter.file_name is None:
            say(reporter.render(report))
        elif path != self._run_dir.report:
            self.save(path, reporter.render(report).encode(errors="backslashreplace"))
            say(f"distdiag: {reporter.name} report: {visible(str(path))}\n")
        append_to_its_file(reporter, report)

    def save(self, path: Path, data: bytes) -> None:
        """Write a small file, on a full disk in the room that was set aside."""
        try:
            try:
                write_atomically(path, data)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.release()
                write_atomically(path, data)
        except OSError:
            _log.exception("%s could not be written", path)

    def save_verdict(self, findings: Iterable[Finding]) -> None:
        """Leave the exit statuses, and what rank 0 waits for: what this attempt's findings ask."""
        self.save(
            self._run_dir.exit_status,
            msgspec.json.encode({str(r): s for r, s in self.rank_status.exit_status.items()}),
        )
        bad = [finding for finding in self.gate.standing(findings) if self.gate.fails(finding)]
        verdict = Verdict(
            exit_status=1 if bad else 0, summary="\n".join(one_line(finding) for finding in bad)
        )
        self.save(self._run_dir.verdict, msgspec.json.encode(verdict))

    def acknowledge(self, rank: int) -> None:
        """Tell a rank that raised that its peers have been dumped."""
        self.save(self._run_dir.ack(rank), b"")

    def release(self) -> None:
        """Give the room back that was set aside."""
        self._run_dir.reserve.unlink(missing_ok=True)

    def _read_earlier(self) -> Report | None:
        if self._run_dir.attempt == 0:
            return None
        try:
            return decode_report(self._path.read_bytes())
        except (OSError, DamagedFileError):
            _log.warning("the report of the attempts before this one cannot be read")
            return None

    def _gaps(self, states: Mapping[int, RankState]) -> dict[str, str]:
        launch = self._launch_file.launch
        gaps: dict[str, str] = {}
        elsewhere = RankSet(set(range(launch.world_size)) - set(self.rank_status.ranks))
        if elsewhere:
            reason = f", and {self.problem}" if self.problem else ""
            gaps[elsewhere.phrase()] = f"not observed: they run on other nodes{reason}"
        if self.unobserved:
            gaps[self.unobserved.phrase()] = "not observed: no agent runs there"
        for rank, state in states.items():
            if state.incomplete:
                gaps[f"rank {rank}"] = f"not observed wholly: {state.incomplete}"
        return gaps

    def _run(self, states: Mapping[int, RankState], *, complete: bool) -> Run:
        launch = self._launch_file.launch
        status = self.rank_status
        earlier = self._earlier
        return Run(
            id=self._run_dir.root.name,
            command=tuple(redacted(self._launch_file.command)),
            world_size=self._world_size,
            ranks=tuple(self._rank_info(rank, states.get(rank)) for rank in status.ranks),
            torch=self._torch,
            started=earlier.run.started if earlier else _rfc3339(launch.started_s),
            ended=_rfc3339(datetime.now(UTC).timestamp()) if complete else None,
            outcome=status.final(self.lost) if complete else status.outcome,
            exit_status=script_status(status.exit_status.values()),
            attempts=launch.attempt + 1 - launch.first_attempt,
            active_modes=self._config.active_modes,
            dump_transport=self.dump_transport,
        )

    @property
    def _world_size(self) -> int:
        return max(self._launch_file.launch.world_size, *(r + 1 for r in self.unobserved), 1)

    def _rank_info(self, rank: int, state: RankState | None) -> RankInfo:
        launch = self._launch_file.launch
        started = state.started if state else None
        hostname = platform.node() if rank in launch.local_ranks else ""
        status: str = state.status if state else RankStatus.SILENT
        if self.rank_status.is_aborted and status == RankStatus.RUNNING:
            status = "aborted"
        return RankInfo(
            rank=rank,
            local_rank=started.local_rank if started else max(0, rank - launch.local_ranks[0]),
            world_size=self._world_size,
            hostname=started.hostname if started else hostname,
            pid=started.pid if started else self.pids.get(rank, 0),
            fate=status,
            last=last_act(state) if state else "",
        )


def crash_finding(error: Exception) -> Finding:
    """Say in the report that the monitor itself failed."""
    what = f"{type(error).__name__}: {error}"
    trace = shortened("".join(traceback.format_exception(error)), LONGEST_TRACEBACK)
    return Finding(
        code="DIA001",
        name="crashed-check",
        severity=Severity.WARNING,
        grade=Grade.PROVEN,
        confidence=1.0,
        message=f"the monitor failed ({what}): what came after that was not judged",
        ranks=RankSet(),
        evidence=(Evidence(ranks=RankSet(), summary=what, values={"traceback": trace}),),
        subjects=("monitor",),
        why="This is a fault of distdiag, not of the training program.",
        fix="Please report it with the traceback; the training itself was not disturbed.",
        disproof="A run of the same program in which the monitor stays up.",
    )


def say(text: str) -> None:
    """Write to stderr, whoever may have closed it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        _log.warning("stderr is closed; it would have said: %s", text.strip()[:500])


def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
