"""The run as a trace for Perfetto or Chrome: a process for each rank, a track for each activity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from distdiag.events.errors import UsageError
from distdiag.findings.finding import Finding, Report
from distdiag.reports.base import Reporter, visible
from distdiag.reports.profiler_trace import ProfilerTrace
from distdiag.reports.rank_records import RankRecords, last_attempt, read_noted, read_ranks
from distdiag.reports.tracks import FINDINGS, RankTracks, TraceEvent

MOST_EVENTS: Final = 400_000
"""So many events of all ranks are drawn, the newest of each: some 150 MB, which Perfetto opens."""
MOST_RANKS_MARKED: Final = 1024


class PerfettoReporter(Reporter):
    """Write Chrome's trace JSON of what the event files hold, with findings as instants.

    The traces of torch's profiler stand beside the recordings of their ranks.
    """

    name: ClassVar[str] = "perfetto"
    file_name: ClassVar[str | None] = "report.trace.json"

    def render(self, report: Report) -> str:
        """Return the trace.

        Raises:
            UsageError: the report has no run directory, or a profiler's trace cannot be read.
            DamagedFileError: a profiler's trace is something else.

        """
        run_dir = last_attempt(self.run_dir) if self.run_dir is not None else None
        if run_dir is None:
            raise UsageError("a trace needs a run directory with the events of the ranks")
        ranks = tuple(read_ranks(run_dir, MOST_EVENTS))
        offsets = _offsets(ranks)
        times = [(r.rank, event.time_ns) for r in ranks for event in (r.events[:1] + r.events[-1:])]
        base_ns, last_ns = _span([time_ns + offsets[rank] for rank, time_ns in times])
        noted = read_noted(run_dir)
        tracks = {
            r.rank: RankTracks(r, offsets[r.rank] - base_ns, last_ns - offsets[r.rank])
            for r in ranks
        }
        events = [event for each in tracks.values() for event in each.events(noted)]
        for finding in report.findings:
            events += _marks(finding, tracks)
        pids = {records.started.pid: records.rank for records in ranks if records.started}
        for path in self.traces:
            events += ProfilerTrace(path, pids).events(base_ns)
        document: dict[str, Any] = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": _notes(ranks, report, base_ns),
        }
        return msgspec.json.encode(document).decode() + "\n"


def _offsets(ranks: Sequence[RankRecords]) -> dict[int, int]:
    """Return how far the wall clock is ahead of the clock of each rank, in ns.

    The ranks of a host have one clock, and one reading of the wall clock serves all of them.
    """
    by_host: dict[str, int] = {}
    for records in ranks:
        if records.started is not None:
            by_host.setdefault(records.started.hostname, records.offset_ns)
    hosts = {records.rank: records.started.hostname for records in ranks if records.started}
    return {records.rank: by_host.get(hosts.get(records.rank, ""), 0) for records in ranks}


def _span(times_ns: Sequence[int]) -> tuple[int, int]:
    return min(times_ns, default=0), max(times_ns, default=0)


def _marks(finding: Finding, tracks: dict[int, RankTracks]) -> Iterator[TraceEvent]:
    """Yield an instant on each culprit, or on the first rank where nobody is to blame."""
    ranks = [rank for rank in finding.ranks if rank in tracks] or sorted(tracks)[:1]
    for rank in ranks[:MOST_RANKS_MARKED]:
        track = tracks[rank]
        yield track.instant(
            FINDINGS,
            f"{finding.severity} {finding.code} {finding.name}",
            track.at_step(finding.step),
            message=finding.message,
            at=finding.location,
            fix=finding.fix,
        )


def _notes(ranks: Sequence[RankRecords], report: Report, base_ns: int) -> dict[str, str]:
    left_out = Counter({r.rank: r.num_left_out for r in ranks if r.num_left_out})
    notes = {
        "tool": f"distdiag {report.tool_version}",
        "unix time of 0, in ns": str(base_ns),
        "left out": f"{left_out.total()} older events" if left_out else "nothing",
    }
    problems = {f"rank {r.rank}": visible(r.problem) for r in ranks if r.problem}
    return notes | problems
