"""What a reader hands back of one source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from distdiag.metrics.series import Curves


@dataclass(slots=True)
class Found:
    """The curves of one source, and what is to be said of it: line (or 0) and one sentence each."""

    source: Path
    curves: list[Curves] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)

    def say(self, why: str, line: int = 0) -> None:
        """Add a remark."""
        self.remarks.append((line, why))
