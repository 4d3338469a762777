"""Check what a job left behind, dumps and run directories, by the engine of live runs."""

from distdiag.analysis.analysis import Progress, analyze
from distdiag.analysis.jobs import split_jobs

__all__ = ["Progress", "analyze", "split_jobs"]
