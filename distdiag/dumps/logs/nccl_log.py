"""What process groups, the store and NCCL said in the logs of a training run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from distdiag.dumps.log_lines import PlacedLine, Speaker, open_log
from distdiag.dumps.logs.group_messages import (
    WORDS,
    DesyncReport,
    Sighting,
    barrier_reports,
    fingerprint_reports,
    group_in,
    mended,
    process_in,
    rank_in,
    rank_of_process,
    report_of,
    sighting,
    words_in,
    writer_of_fingerprint,
)
from distdiag.dumps.logs.group_reports import GroupName, GroupReport, ReportDump
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MOST_FRAMES, python_frame
from distdiag.events.base import Frame, Value
from distdiag.events.stacks import Observed

MOST_SIGHTINGS: Final = 100
"""So many different messages are kept of each rank."""
MOST_REPORTS: Final = 10_000
"""So many calls and counters are kept of each rank; a desync report has one for each peer."""

_UNNAMED: Final = GroupName()
_STACK_HEAD: Final = "Stack trace of the failed collective:"
_STACK_LINE: Final = re.compile(r"#(\d{1,4}) (\S.{0,300}?) from (.{1,1000}):(\d{1,9})$")
_MOST_BREAKS: Final = 3
"""Into so many lines more a message is broken at most: it is 300 characters long, a width 100."""
_WRITER: Final = re.compile(rb"\[rank(\d{1,6})\]:")


@dataclass
class _Seen:
    """What was seen of one rank: messages, each once, and where its collective was called."""

    speaker: Speaker
    label: str = ""
    by_key: dict[tuple[Value, ...], Sighting] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    reports: list[GroupReport] = field(default_factory=list)
    desync: DesyncReport = field(default_factory=DesyncReport)
    group: GroupName = _UNNAMED
    place: int = -1

    def take(self, line: str) -> Sighting | None:
        """Take in what a line says of calls and counters; return its message, if it is one."""
        named = group_in(line)
        if named is not None:
            self.group, self.place = named
        found = sighting(line)
        reports: list[GroupReport | None] = [
            *fingerprint_reports(line, self.group, self.place),
            *self.desync.take(line, self.group, self.place),
        ]
        if found is not None:
            reports.append(report_of(found, self.group, self.place))
            reports += barrier_reports(found, self.group, self.place)
        self.reports += [report for report in reports if report is not None]
        if found is not None and found.kind == "status":
            self._name_group(found)
        del self.reports[MOST_REPORTS:]
        return found

    def _name_group(self, status: Sighting) -> None:
        """Let a status name the group of the timeout before it, which says no more than a rank."""
        for place, report in enumerate(self.reports):
            is_unnamed = report.group == _UNNAMED and self.group != _UNNAMED
            if is_unnamed and report.seq is not None and report.seq == status.values.get("seq"):
                self.reports[place] = msgspec.structs.replace(report, group=self.group)

    def add(self, found: Sighting) -> None:
        """Keep a message, or complete an earlier one about the same call."""
        seq = found.values.get("seq")
        if found.kind == "status":
            # It follows the timeout of the same call, and says what that left out.
            timeout = next((s for s in self.by_key.values() if _is_timeout(s, seq)), None)
            if timeout is not None:
                timeout.values.update({**found.values, **timeout.values})
                return
        key = (found.source, found.kind, found.values.get("group"), seq, found.values.get("error"))
        if key in self.by_key:
            self.by_key[key].values.update({**found.values, **self.by_key[key].values})
        elif len(self.by_key) < MOST_SIGHTINGS:
            self.by_key[key] = found

    def located(self) -> tuple[GroupReport, ...]:
        """Return the reports; the stack that follows them is that of the first call."""
        reports = list(self.reports)
        own = (n for n, each in enumerate(reports) if each.op and each.place in (-1, self.place))
        first = next(own, None)
        if first is not None and self.frames:
            reports[first] = msgspec.structs.replace(reports[first], frames=tuple(self.frames))
        return tuple(reports)


def _is_timeout(found: Sighting, seq: Value) -> bool:
    return found.kind == "timeout" and found.values.get("seq") == seq


class NcclLog(DumpReader):
    """Read the messages about stuck and failed collectives in logs."""

    name = "nccl-log"

    def recognises(self, dump: Dump) -> bool:
        """Look for words of the messages."""
        return any(word in dump.data for word in WORDS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield what was said of each rank, in the order in which it was said first."""
        seen: dict[tuple[Speaker, str], _Seen] = {}
        stack = _FailedCollective()
        writer = Speaker(), ""
        log = open_log(dump)
        processes: dict[str, int] = {}
        for line in log.lines_with((*words_in(dump.data), _STACK_HEAD.encode(), b"\n#")):
            whole = mended(line.text, islice(log.after(line.place), _MOST_BREAKS))
            line = line._replace(text=whole)
            processes |= dict(filter(None, [rank_of_process(line.text)]))
            if line.text.startswith("#") and stack.take(line.text):
                continue
            # A line of a report that names nobody goes on with the report of the writer before.
            writer = _writer(line, writer, processes)
            of_writer = seen.setdefault(writer, _Seen(*writer))
            if _STACK_HEAD in line.text:
                stack.begin(of_writer.frames)
            elif (found := of_writer.take(line.text)) is not None:
                _name(line.text, found)
                of_writer.add(found)
        if any(speaker != Speaker() and each.by_key for (speaker, _), each in seen.items()):
            # What nobody signed repeats what somebody did.
            seen = {key: each for key, each in seen.items() if key[0] != Speaker()}
        num_ranks = max((int(match[1]) for match in _WRITER.finditer(dump.data)), default=-1) + 1
        for rank in seen.values():
            if rank.by_key or rank.reports:
                yield self._dump(dump.path, rank, num_ranks)

    def _dump(self, path: str, seen: _Seen, num_ranks: int) -> RankDump:
        rank = UNKNOWN_RANK if seen.speaker.rank is None else seen.speaker.rank
        return ReportDump(
            rank=seen.speaker.rank,
            local_rank=seen.speaker.local_rank,
            events=tuple(
                Observed(
                    rank=rank,
                    seq=-1,
                    time_ns=0,
                    source=found.source,
                    summary=found.text,
                    values={"kind": found.kind, **found.values, **_location(found, seen.frames)},
                )
                for found in seen.by_key.values()
            ),
            path=path,
            source=self.name,
            label=seen.label,
            reports=seen.located(),
            num_ranks=num_ranks,
        )


class _FailedCollective:
    """The stack that follows the words about it, on lines of their own without a rank.

    Lines of several ranks may be mixed; then the numbers of the frames are out of order, and what
    follows is nobody's.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] | None = None

    def begin(self, frames: list[Frame]) -> None:
        """Expect the frames of a rank, whose list this is."""
        self._frames = frames if not frames else None

    def take(self, text: str) -> bool:
        """Take one line; say whether it is a frame at all."""
        match = _STACK_LINE.match(text)
        if match is None:
            return False
        number, function, file, line = match.groups()
        if self._frames is not None and int(number) == len(self._frames) < MOST_FRAMES:
            self._frames.append(python_frame(file, line, function))
        else:
            self._frames = None
        return True


def _writer(
    line: PlacedLine, before: tuple[Speaker, str], processes: Mapping[str, int]
) -> tuple[Speaker, str]:
    """Return whose line it is, by its prefix, else by the group that it names, else as before.

    The place in a group that is not the default one is no rank, but it names the process.
    """
    own = rank_of_process(line.text)
    rank = own[1] if own is not None else processes.get(process_in(line.text))
    if rank is not None and line.speaker.rank is None:
        return Speaker(rank), ""
    if line.speaker != Speaker():
        return line.speaker, ""
    named = group_in(line.text)
    if named is None:
        if line.text[:1].isspace():
            return before
        # The debug wrapper of the default group signs by the place in it, which is the rank.
        return Speaker(writer_of_fingerprint(line.text)), ""
    if (rank := rank_in(line.text)) is not None:
        return Speaker(rank), ""
    group, place = named
    return line.speaker, f"rank {place} of group {group.desc or group.name}"


def _name(line: str, found: Sighting) -> None:
    """Add the group that a message names to its values."""
    named = group_in(line)
    if named is None:
        return
    group, place = named
    if name := group.desc or group.name:
        found.values.update(group=name, group_rank=place)


def _location(found: Sighting, frames: list[Frame]) -> dict[str, Value]:
    """Return the line of user code that called what timed out, where the log tells it."""
    user = next((frame for frame in frames if frame.user), None)
    if found.kind != "timeout" or found.source != "nccl-log" or user is None:
        return {}
    return {"file": user.file, "line": user.line, "function": user.function}
