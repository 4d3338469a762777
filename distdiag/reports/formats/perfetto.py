"""The run as a trace for Perfetto or Chrome: a process for each rank, a track for each activity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import msgspec

from distdiag.events.errors import UsageError
from distdiag.findings.finding import Finding, Report
from distdiag.record.visible import visible
from distdiag.reports.base import Reporter
from distdiag.reports.profiler_trace import ProfilerTrace
from distdiag.reports.recording import Bounds, Recording, read_recording
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
        recording = read_recording(self.run_dir, Bounds(MOST_EVENTS, MOST_EVENTS))
        if not recording.by_rank:
            raise UsageError("a trace needs a run directory with the events of the ranks")
        offsets = recording.offsets_ns()
        base_ns, last_ns = _span(recording, offsets)
        tracks = {
            rank: RankTracks(rank, recent, offsets[rank] - base_ns, last_ns - offsets[rank])
            for rank, recent in recording.by_rank.items()
        }
        events = [event for each in tracks.values() for event in each.events(recording.noted)]
        for finding in report.findings:
            events += _marks(finding, tracks)
        recent_by_rank = recording.by_rank.items()
        pids = {recent.started.pid: rank for rank, recent in recent_by_rank if recent.started}
        for path in self.traces:
            events += ProfilerTrace(path, pids).events(base_ns)
        document: dict[str, Any] = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": _notes(recording, report, base_ns),
        }
        return msgspec.json.encode(document).decode() + "\n"


def _span(recording: Recording, offsets: Mapping[int, int]) -> tuple[int, int]:
    """Return the first and the last moment of all ranks on the wall clock, in ns."""
    times_ns = [
        event.time_ns + offsets[rank]
        for rank, recent in recording.by_rank.items()
        for event in recent.events[:1] + recent.events[-1:]
    ]
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


def _notes(recording: Recording, report: Report, base_ns: int) -> dict[str, str]:
    left_out = sum(recent.num_left_out for recent in recording.by_rank.values())
    notes = {
        "tool": f"distdiag {report.tool_version}",
        "unix time of 0, in ns": str(base_ns),
        "left out": f"{left_out} older events" if left_out else "nothing",
    }
    problems = {rank: recent.problem for rank, recent in recording.by_rank.items()}
    return notes | {f"rank {rank}": visible(text) for rank, text in problems.items() if text}
