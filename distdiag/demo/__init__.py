"""Two tiny training scripts: one that is right, and its twin that leaves its peers waiting."""

from pathlib import Path

__all__ = ["HEALTHY", "SICK"]

HEALTHY = Path(__file__).with_name("healthy.py")
SICK = Path(__file__).with_name("sick.py")
