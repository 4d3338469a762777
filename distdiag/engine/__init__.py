"""Put the ranks' events side by side, show them to the checks, collect the findings."""

from distdiag.engine.engine import Engine

__all__ = ["Engine"]
