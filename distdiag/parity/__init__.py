"""Compares runs of one script on different numbers of ranks, and says what differs first."""

from distdiag.record.marks import batch

__all__ = ["batch"]
