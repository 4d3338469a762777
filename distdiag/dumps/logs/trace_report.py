"""What torch's analyzer of flight recorders (``torchfrtrace``) prints of a call that some missed.

The format is that of ``EntryState.log`` in ``torch.distributed.flight_recorder``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.dumps.flight_recorder.names import backend_and_op
from distdiag.dumps.log_lines import Log, open_log
from distdiag.dumps.logs.group_reports import GroupName, GroupReport, ReportDump
from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MOST_FRAMES, python_frame
from distdiag.events.base import Frame

_SIGN: Final = b"Not all ranks joining collective"
_HEAD: Final = re.compile(r"Not all ranks joining collective[,:] sequence number: (\d{1,18})")
_FIELD: Final = re.compile(
    r"(group info|collective|missing ranks|expected ranks): {1,3}(\S.{0,20000}?)\s{0,8}$"
)
_LAST_FIELD: Final = "collective stack trace:"
_FRAME: Final = re.compile(r"\s{0,8}(\S.{0,300}?) at (\S.{0,1000}):(\d{1,9})$")
_MOST_FIELDS: Final = 16
"""The analyzer prints thirteen at most."""
_MOST_RANKS: Final = 100_000


class TraceReport(DumpReader):
    """Read which ranks did not come to a call, as torch's analyzer of flight recorders says it."""

    name = "trace-report"

    def recognises(self, dump: Dump) -> bool:
        """Look for the words about such a call."""
        return _SIGN in dump.data

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield for each rank the calls to which it came, and those that it missed."""
        log = open_log(dump)
        of_rank: dict[int, list[GroupReport]] = {}
        for line in log.lines_with([_SIGN]):
            if match := _HEAD.search(line.text):
                for rank, report in _reports(int(match[1]), log, line.place):
                    of_rank.setdefault(rank, []).append(report)
        for rank, reports in of_rank.items():
            yield ReportDump(
                rank=rank,
                events=(),
                path=dump.path,
                source=self.name,
                reports=tuple(reports),
                num_ranks=max(of_rank) + 1,
            )


def _reports(seq: int, log: Log, place: int) -> Iterator[tuple[int, GroupReport]]:
    """Yield what the analyzer says of each rank of the group of one call."""
    lines = log.after(place)
    fields: dict[str, str] = {}
    for _, line in zip(range(_MOST_FIELDS), lines, strict=False):
        if match := _FIELD.search(line):
            fields[match[1]] = match[2]
        elif _LAST_FIELD in line or _HEAD.search(line):
            break
    missing, expected = _ranks(fields, "missing ranks"), _ranks(fields, "expected ranks")
    if not missing or not missing < expected:
        return
    name, _, desc = fields.get("group info", "").partition(":")
    group = GroupName(name, desc)
    backend, op = backend_and_op(fields.get("collective", ""))
    frames = tuple(_frames(lines))
    for number, rank in enumerate(sorted(expected)):
        if rank in missing:
            yield rank, GroupReport(group=group, own_place=number, enqueued=seq - 1)
        else:
            yield (
                rank,
                GroupReport(
                    group=group, backend=backend, own_place=number, op=op, seq=seq, frames=frames
                ),
            )


def _ranks(fields: dict[str, str], name: str) -> set[int]:
    numbers = re.findall(r"\d{1,7}", fields.get(name, ""))[:_MOST_RANKS]
    return {int(number) for number in numbers}


def _frames(lines: Iterator[str]) -> Iterator[Frame]:
    """Yield the frames of the call, innermost first."""
    for _, line in zip(range(MOST_FRAMES), lines, strict=False):
        match = _FRAME.match(line)
        if match is None:
            return
        function, file, number = match.groups()
        yield python_frame(file, number, function)
