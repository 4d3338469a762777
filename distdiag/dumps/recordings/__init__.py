"""Recordings of a flight recorder: built from one dump, compared over all ranks, told as events."""

from distdiag.dumps.recordings.builder import RecordingBuilder
from distdiag.dumps.recordings.recording import Recording, RecordingDump
from distdiag.dumps.recordings.run import RecordedRun

__all__ = ["RecordedRun", "Recording", "RecordingBuilder", "RecordingDump"]
