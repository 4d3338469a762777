"""What a reader hands back of one source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distdiag.metrics.series import Curves

_MOST_REMARKS: Final = 10


@dataclass(slots=True)
class Found:
    """The curves of one source, and what is to be said of it: line (or 0) and one sentence each."""

    source: Path
    curves: list[Curves] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    _num_said: int = 0

    def say(self, why: str, line: int = 0) -> None:
        """Add a remark; of many, the first ones are kept, and the number of the others."""
        if (line, why) in self.remarks:
            return
        self._num_said += 1
        if self._num_said <= _MOST_REMARKS:
            self.remarks.append((line, why))
        else:
            more = self._num_said - _MOST_REMARKS
            self.remarks[_MOST_REMARKS:] = [(line, f"and {more:,} more such lines, up to this one")]
