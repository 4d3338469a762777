"""Asks a rank for its flight recorder, which the rank's own background thread writes as JSON.

The thread needs the GIL for it: where that is held for ever there is no answer, and this is told.
"""

import time
from pathlib import Path
from typing import Final

import msgspec

from distdiag.dumps.base import RankDumpSource
from distdiag.dumps.rank_request import is_answered
from distdiag.events.base import Value
from distdiag.events.errors import UNDECODABLE
from distdiag.events.stacks import Observed
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import RunDir

MOST_BYTES: Final = 256 << 20


class _Entry(msgspec.Struct, frozen=True):
    """What is needed of an entry; torch's names. gloo never sets `state`, but `retired`."""

    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str = ""
    state: str = ""
    retired: bool = False

    @property
    def is_pending(self) -> bool:
        return not self.retired and self.state != "completed"

    def __str__(self) -> str:
        name, desc = self.process_group
        number = self.p2p_seq_id if self.is_p2p else self.collective_seq_id
        return f"{self.profiling_name} {number} of {desc or name} ({self.state or 'unknown'})"


class _Answer(msgspec.Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()
    error: str = ""


_decode: Final = msgspec.json.Decoder(_Answer).decode


class FlightRequest(RankDumpSource):
    """Leave the request in the run directory, and tell what the answer holds.

    The answer itself stays as torch wrote it, at `RunDir.flight`, for a reader of such dumps.
    """

    name = "flight-recorder"

    def __init__(self, run_dir: RunDir) -> None:
        """Ask the ranks of this run."""
        self._run_dir = run_dir

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell how many calls the rank has recorded, and which are pending."""
        try:
            # Somewhat less than there is: the reason should be told in time.
            deadline = time.monotonic() + 0.8 * timeout_s
            if not is_answered(self._run_dir, rank, "flight", deadline):
                return self.observed(
                    rank,
                    error="the rank's background thread does not answer: "
                    "the GIL is held, or the process stands still",
                )
            return self._told(rank, self._run_dir.flight(rank))
        except OSError as error:
            return self.observed(rank, error=f"{type(error).__name__}: {error}")

    def _told(self, rank: int, path: Path) -> Observed:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return self.observed(rank, error=f"{path} has {size} bytes")
        try:
            answer = _decode(read_regular(path, MOST_BYTES))
        except UNDECODABLE as error:
            return self.observed(rank, error=f"{path} is damaged: {error}")
        if answer.error:
            return self.observed(rank, error=answer.error)
        pending = [entry for entry in answer.entries if entry.is_pending]
        values: dict[str, Value] = {
            "path": str(path),
            "size_bytes": size,
            "num_entries": len(answer.entries),
            "num_pending": len(pending),
            "last": str(answer.entries[-1]) if answer.entries else "",
        }
        if (second := self._run_dir.second_flight(rank)).exists():
            values["second_path"] = str(second)
        if not pending:
            return self.observed(
                rank, f"all {len(answer.entries)} recorded calls have ended", values
            )
        values["oldest_pending"] = str(pending[0])
        summary = f"{len(pending)} of {len(answer.entries)} recorded calls are pending, the oldest "
        return self.observed(rank, summary + f"is {pending[0]}", values)
