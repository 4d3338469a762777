"""The summary of failures that torchrun prints when a job has failed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from distdiag.dumps.log_lines import PlacedLine, open_log
from distdiag.dumps.logs.survival import restarted_at
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.events.base import Event, Value
from distdiag.events.lifecycle import Exited
from distdiag.events.stacks import Observed

_EXITCODE: Final = b"exitcode"
_WORDS: Final = (
    *(_EXITCODE, b"Root Cause", b"Other Failures", b" time", b" host", b" rank"),
    *(b"\ntime ", b"\nhost ", b"\nrank "),  # somebody has taken the indentation away
)
# Before torch 1.11 no space stood before the colons, and the root cause came first.
_FIELD: Final = re.compile(r"\s{0,8}(time|host|rank|exitcode)\s{0,8}: (.{1,300})$")
# Where the line feeds are gone as well: what begins a line of the summary.
_LINE_START: Final = re.compile(
    r"\s+(?=(?:time|host|rank|exitcode|error_file|traceback)\s{1,8}: |Root Cause|Other Failures)"
)
_ROOT: Final = "Root Cause"
_OTHERS: Final = "Other Failures"
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d:\d\d:\d\d)", re.ASCII)
_RANK: Final = re.compile(r"(\d{1,6}) \(local_rank: (\d{1,6})\)")
_EXIT: Final = re.compile(r"(-?\d{1,10}) \(pid: (\d{1,10})\)(?:\s{1,4}\((\w{1,20})\))?")
# The line that is logged at once, and all that there is where the summary was cut off.
_AT_ONCE: Final = re.compile(
    r"failed \(exitcode: (-?\d{1,10})\) local_rank: (\d{1,6}) \(pid: (\d{1,10})\)"
)
_SIGTERM: Final = -15


@dataclass(frozen=True)
class _Failure:
    rank: int | None
    local_rank: int
    exitcode: int
    pid: int
    signal: str = ""
    host: str = ""
    time_ns: int = 0
    is_first: bool = False
    place: int = 0
    label: str = ""

    @property
    def reason(self) -> str:
        """How the process ended, in a few words."""
        if self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        name = self.signal or f"signal {-self.exitcode}"
        by_launcher = self.exitcode == _SIGTERM and not self.is_first
        return f"killed by {name}" + (" from its launcher" if by_launcher else "")

    def events(self, source: str) -> Iterator[Event]:
        rank = UNKNOWN_RANK if self.rank is None else self.rank
        values: dict[str, Value] = {
            "exitcode": self.exitcode,
            "pid": self.pid,
            "local_rank": self.local_rank,
            "is_first_failure": self.is_first,
        }
        values |= {"host": self.host} if self.host else {}
        said = "the first failure that torchrun observed: " if self.is_first else ""
        yield Observed(
            rank=rank,
            seq=-1,
            time_ns=self.time_ns,
            source=source,
            summary=said + self.reason,
            values=values,
        )
        # The clock has seconds only; what torchrun calls the first failure came first.
        time_ns = self.time_ns + (not self.is_first) if self.time_ns else 0
        yield Exited(rank=rank, seq=-1, time_ns=time_ns, reason=self.reason, status=self.exitcode)


class TorchelasticText(DumpReader):
    """Read how each failed rank ended, and which one torchrun saw fail first."""

    name = "torchelastic"

    def recognises(self, dump: Dump) -> bool:
        """Look for the exit code of a process."""
        return _EXITCODE in dump.data

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield one end for each failed rank."""
        log = open_log(dump)
        found: dict[tuple[int | None, str], _Failure] = {}
        for failure in _failures(log.lines_with(_WORDS)):
            known = found.get((failure.rank, failure.host))
            if known is None or not known.is_first:  # each node's launcher prints a summary
                found[failure.rank, failure.host] = failure
        start = restarted_at(log)
        last = (line for line in log.lines_with([_EXITCODE]) if line.place >= start)
        for failure in list(found.values()) or _at_once(last):
            yield RankDump(
                rank=failure.rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                label=failure.label,
                node=failure.host,
                place=failure.place,
                events=tuple(failure.events(self.name)),
                path=dump.path,
                source=self.name,
            )


def _lines(log: Iterator[PlacedLine]) -> Iterator[tuple[str, int]]:
    """Yield the lines of summaries, also of those that were put on one line."""
    for _, text, place in log:
        if "exitcode " in text and "rank " in text:
            yield from ((part, place) for part in _LINE_START.split(text))
        else:
            yield text, place


def _failures(log: Iterator[PlacedLine]) -> Iterator[_Failure]:
    fields: dict[str, str] = {}
    is_first = False
    for text, place in _lines(log):
        if _ROOT in text or _OTHERS in text:
            is_first = _ROOT in text
        match = _FIELD.match(text)
        if match is None:
            continue
        if match[1] == "time":
            fields = {}
        fields[match[1]] = match[2]
        if match[1] == "exitcode" and (failure := _failure(fields, place, is_first=is_first)):
            is_first = False
            if failure.exitcode:
                yield failure


def _failure(fields: dict[str, str], place: int, *, is_first: bool) -> _Failure | None:
    rank = _RANK.match(fields.get("rank", ""))
    ended = _EXIT.match(fields["exitcode"])
    if rank is None or ended is None:
        return None
    return _Failure(
        rank=int(rank[1]),
        local_rank=int(rank[2]),
        exitcode=int(ended[1]),
        pid=int(ended[2]),
        signal=ended[3] or "",
        host=fields.get("host", "").strip(),
        time_ns=_time_ns(fields.get("time", "")),
        is_first=is_first,
        place=place,
    )


def _time_ns(text: str) -> int:
    """Return the time since 1970 of a wall clock whose zone is not told, in whole seconds."""
    match = _TIME.match(text)
    if match is None:
        return 0
    try:
        time = datetime.fromisoformat(f"{match[1]}T{match[2]}+00:00")
    except ValueError:
        return 0
    return max(0, int(time.timestamp())) * 1_000_000_000


def _at_once(log: Iterator[PlacedLine]) -> Iterator[_Failure]:
    for speaker, text, place in log:
        if match := _AT_ONCE.search(text):
            exitcode, local_rank, pid = (int(number) for number in match.groups())
            label = f"{speaker.label} local rank {local_rank}".strip()
            yield _Failure(
                None, local_rank, exitcode, pid, host=speaker.label, place=place, label=label
            )
