"""Judge what a job left behind, dumps and run directories, by the engine that judges live runs."""

from distdiag.analysis.analysis import analyze
from distdiag.analysis.progress import Progress

__all__ = ["Progress", "analyze"]
