"""A run as event files of TensorBoard: a run of it for each rank, and one for the findings."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from distdiag.events.errors import UsageError
from distdiag.events.lifecycle import StepEnd
from distdiag.findings.finding import Finding, Report
from distdiag.metrics.readers.event_files import masked_crc
from distdiag.metrics.readers.messages import NoProtobufError, message_class
from distdiag.reports.formats.html.curves import Chart, charts_of
from distdiag.reports.formats.markdown import diagnosis
from distdiag.reports.recording import Bounds, Recording, read_recording

FILE_NAME: Final = "events.out.tfevents.0.distdiag"
_VERSION: Final = "brain.Event:2"
_STRING: Final = 7
"""TensorFlow's number of the type of texts."""
_BOUNDS: Final = Bounds(most_events=400_000, most_of_a_rank=400_000)


def write_event_files(report: Report, run_dir: Path, folder: Path) -> int:
    """Write the curves of each rank and the findings below a folder; return how many files.

    Raises:
        UsageError: protobuf is not installed, or the files cannot be written.

    """
    try:
        event_class = message_class("Event")
    except NoProtobufError:
        raise UsageError("tensorboard needs protobuf: pip install 'distdiag[metrics]'") from None
    recording = read_recording(run_dir, _BOUNDS)
    started = datetime.fromisoformat(report.run.started).timestamp() if report.run.started else 0.0
    training, routing = charts_of(recording)
    files = {"findings": [_text(event_class(), each, started) for each in report.findings]}
    for rank in recording.by_rank:
        times = _times_of(recording, rank)
        scalars = _scalars_of((*training, *routing), rank)
        files[f"rank-{rank}"] = [
            _scalar(event_class(wall_time=times.get(step, started), step=step), tag, value)
            for step, tag, value in sorted(scalars)
        ]
    written = {name: events for name, events in files.items() if events}
    first = event_class(wall_time=started, file_version=_VERSION)
    for name, events in written.items():
        data = b"".join(_record(each.SerializeToString()) for each in (first, *events))
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / FILE_NAME).write_bytes(data)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written: {error.strerror}") from None
    return len(written)


def _times_of(recording: Recording, rank: int) -> dict[int, float]:
    """Return the wall clock of a rank, in seconds, by the steps that end then."""
    offset_ns = recording.offsets_ns()[rank]
    ends = (each for each in recording.of(StepEnd) if each.rank == rank)
    return {each.step: (each.time_ns + offset_ns) / 1e9 for each in ends}


def _scalars_of(charts: Iterable[Chart], rank: int) -> Iterator[tuple[int, str, float]]:
    for chart in charts:
        tag = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
        for curve in (each for each in chart.curves if each.rank == rank):
            for step, value in curve.points:
                yield step, tag, float("nan") if value is None else value


def _scalar(event: Any, tag: str, value: float) -> Any:  # noqa: ANN401 - made while it runs
    event.summary.value.add(tag=tag, simple_value=value)
    return event


def _text(event: Any, finding: Finding, time_s: float) -> Any:  # noqa: ANN401 - made while it runs
    event.wall_time, event.step = time_s, finding.step or 0
    value = event.summary.value.add(tag=f"{finding.code} {finding.name}")
    value.metadata.plugin_data.plugin_name = "text"
    value.tensor.dtype = _STRING
    value.tensor.tensor_shape.dim.add(size=1)
    value.tensor.string_val.append(diagnosis(finding).encode(errors="backslashreplace"))
    return event


def _record(data: bytes) -> bytes:
    """Return a record: its length and its content, each with a checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )
