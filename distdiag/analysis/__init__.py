"""Check what a job left behind, dumps and run directories, by the engine of live runs."""

from distdiag.analysis.analysis import Progress, analyze

__all__ = ["Progress", "analyze"]
