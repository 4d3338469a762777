"""What process groups, the store and NCCL write to logs when something is stuck.

The texts are those of torch 1.13 to 2.14 and of torch_npu; numbers and names in them are values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from distdiag.dumps.flight_recorder.names import dtype_name
from distdiag.dumps.logs.group_reports import GroupName, GroupReport, op_of, sizes_of
from distdiag.events.base import Value
from distdiag.events.collectives import Sizes

_LONGEST_TEXT: Final = 300


class Message(NamedTuple):
    """One kind of message. `pattern` is searched for; its named groups are the values."""

    kind: str
    source: str
    pattern: re.Pattern[str]


class Sighting(NamedTuple):
    """A message in a line, with its values (numbers as numbers)."""

    kind: str
    source: str
    text: str
    values: dict[str, Value]


def _message(kind: str, source: str, pattern: str) -> Message:
    return Message(kind, source, re.compile(pattern))


_WORK: Final = (
    r"Work(?P<backend>[A-Z]{2,8})\((?:SeqNum=(?P<seq>\d{1,18}), )?OpType=(?P<op>\w{1,40})"
    r"(?:, NumelIn=(?P<numel_in>\d{1,20}), NumelOut=(?P<numel_out>\d{1,20}))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
    r"(?:, Timeout\(ms\)=(?P<timeout_ms>\d{1,18}))?\)"
)
_COUNTS: Final = (
    r"last enqueued (?:NCCL )?work: (?P<last_enqueued>-?\d{1,18}), "
    r"last completed (?:NCCL )?work: (?P<last_completed>-?\d{1,18})"
)

MESSAGES: Final = (
    _message(
        "timeout",
        "nccl-log",
        r"(?:[Ww]atchdog c|C)aught collective operation timeout: "
        + _WORK
        + r" ran for (?P<ran_ms>\d{1,18}) milliseconds",
    ),
    _message("timeout", "nccl-log", r"Work " + _WORK + r" timed out in blocking wait"),
    _message(
        "status",
        "nccl-log",
        r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): "
        r"(?P<seq>-?\d{1,18}),?(?: PG status:)? " + _COUNTS,
    ),
    _message(
        "dump-signal",
        "nccl-log",
        r"Received a (?:dump signal|global timeout)"
        r"(?: due to a collective timeout)? from {1,2}"
        r"(?:rank (?P<from_rank>\d{1,6})|this local rank|another rank)"
        r".{1,80}?Last enqueued NCCL work: "
        r"(?P<last_enqueued>-?\d{1,18}), last completed NCCL work: (?P<last_completed>-?\d{1,18})",
    ),
    _message(
        "watchdog-stuck", "nccl-log", r"[Ww]atchdog got stuck for (?P<stuck_s>\d{1,9}) seconds"
    ),
    _message("watchdog-stuck", "nccl-log", r"Heartbeat monitor timed out"),
    _message(
        "dump-signal",
        "nccl-log",
        r"Observed flight recorder dump signal from another rank via TCPStore",
    ),
    _message(
        "init-failed",
        "store-log",
        r"\[(?P<group_rank>\d{1,6})\] is setting up NCCL communicator and retrieving ncclUniqueId "
        r"from \[(?P<from_rank>\d{1,6})\].{1,200}? got error: (?P<error>.{1,200})",
    ),
    _message(
        "nccl-error",
        "nccl-log",
        r"NCCL error in: .{1,300}?(?P<error>(?:remote process exited|unhandled|internal error"
        r"|invalid usage|invalid argument|network error).{0,120})",
    ),
    _message("nccl-warning", "nccl-log", r"NCCL WARN (?P<error>.{1,300})"),
    _message(
        "xid",
        "kernel-log",
        r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]{4,20})\): (?P<xid>\d{1,4}),? ?"
        r"(?P<error>.{0,200})",
    ),
    _message(
        "nvlink",
        "kernel-log",
        r"(?P<error>NVLink\d{0,2}: .{0,80}?(?:fatal|inactive|link down|CRC|error).{0,100})",
    ),
    _message(
        "hccl-error",
        "hccl-log",
        r"(?:EI0002|The wait execution of the Notify register times out).{0,300}?"
        r"remote rank:? ?\[?(?P<missing_ranks>\d{1,6})\]?",
    ),
    _message(
        "monitored-barrier",
        "gloo-log",
        r"Ranks? (?P<missing_ranks>\d[\d, ]{0,200}?) failed to pass monitoredBarrier"
        r"(?: in (?P<timeout_ms>\d{1,18}) ms)?",
    ),
    _message(
        "monitored-barrier",
        "gloo-log",
        r"Ranks? (?P<missing_ranks>\d{1,6}) timed out in monitoredBarrier"
        r"(?: after (?P<timeout_ms>\d{1,18}) ms)?",
    ),
    _message(
        "barrier-passed",
        "gloo-log",
        r"Rank (?P<group_rank>\d{1,6}) successfully reached monitoredBarrier",
    ),
    _message(
        "timeout",
        "gloo-log",
        r"Timed out waiting (?P<timeout_ms>\d{1,18}) ?ms for (?P<op>send|recv) operation",
    ),
    _message(
        "peer-gone",
        "gloo-log",
        r"gloo.{0,200}?(?P<error>Connection (?:closed|reset) by peer)(?: \[(?P<peer>.{1,60}?)\])?",
    ),
    _message(
        "timeout",
        "store-log",
        r"(?:wait )?timeout after (?P<timeout_ms>\d{1,18}) ?ms, keys: (?P<keys>.{1,200})",
    ),
    _message(
        "clients-missing",
        "store-log",
        r"Timed out after (?P<timeout_s>\d{1,9}) seconds waiting for clients\. "
        r"(?P<num_here>\d{1,7})/(?P<num_expected>\d{1,7}) clients joined",
    ),
)
WORDS: Final = (
    b"atchdog",
    b"Heartbeat monitor",
    b"dump signal",
    b"global timeout",
    b"operation timeout",
    b"blocking wait",
    b"NCCL work",
    b"NCCL WARN",
    b"NCCL error",
    b"NCCL communicator",
    b"NVRM: Xid",
    b"NVLink",
    b"Notify register",
    b"RankID:",
    b"monitoredBarrier",
    b" by peer",
    b"Timed out ",
    b"timeout after ",
    b"CollectiveFingerPrint",
    b"Timeout at collective",
    b"ranks that caused",
    b"started ranks:",
    b"finished ranks:",
    b" collective #",
)
"""Every line that holds one of the messages has one of these words."""
WORDS_OF_SNAPSHOT: Final = (b"] started ", b"] finished ")
"""Lines below ``started ranks:`` and ``finished ranks:``; elsewhere they are common."""


def words_in(data: bytes) -> tuple[bytes, ...]:
    """Return the words by which the lines of messages are found in a log."""
    has_snapshot = b"started ranks:" in data or b"finished ranks:" in data
    return (*WORDS, *WORDS_OF_SNAPSHOT) if has_snapshot else WORDS


def sighting(line: str) -> Sighting | None:
    """Return the first message that a line holds, or None."""
    for kind, source, pattern in MESSAGES:
        if match := pattern.search(line):
            found = match.groupdict()
            source = f"{found.pop('backend', None) or source.partition('-')[0]}-log".lower()
            values = {name: _value(text) for name, text in found.items() if text}
            return Sighting(kind, source, match.group()[:_LONGEST_TEXT], values)
    return None


def _value(text: str) -> Value:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() else text.strip()


# Whose message it is: ``[PG ID 0 PG GUID 0(default_pg) Rank 3]``, ``[PG 1 (dp) Rank 0]``,
# ``[Rank 3]``. The rank is that within the group.

_GROUP: Final = re.compile(
    r"\[(?:PG (?:ID )?(?P<id>\w{1,80})(?: PG GUID (?P<guid>[^\s()]{1,80}))?"
    r" ?(?:\((?P<desc>[^()]{0,120})\) ?)?)?(?: )?Rank (?P<rank>\d{1,6})\]"
)


def group_in(line: str) -> tuple[GroupName, int] | None:
    """Return the group that a message names, and the place of the writer in it."""
    match = _GROUP.search(line)
    if match is None:
        return None
    return GroupName(match["guid"] or match["id"] or "", match["desc"] or ""), int(match["rank"])


def rank_in(line: str) -> int | None:
    """Return the rank that a message names as its writer, which is that in the default group."""
    named = group_in(line)
    return named[1] if named is not None and named[0].is_default else None


# torch_npu names a process and its rank in the first line of an error only.
_RANK_OF_PROCESS: Final = re.compile(r"\(PID:(\d{1,9}), Device:-?\d{1,4}, RankID:(\d{1,6})\)")
_PROCESS: Final = re.compile(r"\[PID: (\d{1,9})\]")


def rank_of_process(line: str) -> tuple[str, int] | None:
    """Return the number of a process and its rank, where a line of torch_npu tells both."""
    match = _RANK_OF_PROCESS.search(line)
    return None if match is None else (match[1], int(match[2]))


def process_in(line: str) -> str:
    """Return the number of the process that a line of HCCL is about, if it tells one."""
    match = _PROCESS.search(line)
    return "" if match is None else match[1]


# A terminal may have broken a message at a width: then it goes on in lines that begin
# no message.
_HEAD_OF_LINE: Final = re.compile(r"ProcessGroup[A-Z]\w{2,12}\.cpp:\d{1,6}\]")
_BEGUN: Final = re.compile(rf"{_HEAD_OF_LINE.pattern}|\[Rank \d{{1,6}}\] [A-Z]")


def mended(line: str, following: Iterable[str]) -> str:
    """Return a line with those that follow, as far as that makes a message; else as it is."""
    if _BEGUN.search(line) is None or sighting(line) is not None:
        return line
    # The break took a space away, or stands within a word.
    joined = spaced = line
    for more in following:
        if _HEAD_OF_LINE.search(more):
            break
        joined, spaced = joined + more, f"{spaced.rstrip()} {more.lstrip()}"
        whole = next((text for text in (joined, spaced) if sighting(text) is not None), "")
        if whole:
            return whole
    return line


# What a message says of calls and counters.


def report_of(found: Sighting, group: GroupName, place: int) -> GroupReport | None:
    """Return what a message says of the rank that wrote it, or None."""
    values = found.values
    enqueued, completed = _number(values, "last_enqueued"), _number(values, "last_completed")
    if found.kind == "timeout" and "op" in values and found.source.removesuffix("-log") != "gloo":
        op = op_of(str(values["op"]))
        inputs, outputs = _sizes(op, values)
        return GroupReport(
            group=group,
            backend=found.source.removesuffix("-log"),
            own_place=place,
            op=op,
            seq=_number(values, "seq") if "seq" in values else None,
            input_sizes=inputs,
            output_sizes=outputs,
            ran_s=max(_number(values, "ran_ms"), _number(values, "timeout_ms"), 0) / 1000,
        )
    if found.kind in ("status", "dump-signal") and enqueued >= 0:
        return GroupReport(group=group, own_place=place, enqueued=enqueued, completed=completed)
    return None


def barrier_reports(found: Sighting, group: GroupName, place: int) -> Iterator[GroupReport]:
    """Yield who came to a monitored barrier and who did not, as far as a message says it."""
    if found.kind not in ("monitored-barrier", "barrier-passed"):
        return
    own = place if place >= 0 else _number(found.values, "group_rank")
    own = 0 if own < 0 else own  # the first rank of the group asks the others
    waited_s = max(_number(found.values, "timeout_ms"), 0) / 1000
    yield GroupReport(
        group=group,
        backend="gloo",
        own_place=own,
        place=own,
        op="monitored_barrier",
        ran_s=waited_s,
    )
    for missing in re.findall(r"\d{1,6}", str(found.values.get("missing_ranks", ""))):
        yield GroupReport(group=group, backend="gloo", own_place=own, place=int(missing))


def _number(values: dict[str, Value], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else -1


def _sizes(op: str, values: dict[str, Value]) -> tuple[Sizes, Sizes]:
    if "numel_in" in values:
        return sizes_of(op, _number(values, "numel_in"), _number(values, "numel_out"))
    if "shape" in values and op in ("all_reduce", "broadcast", "reduce"):
        return _shapes(str(values["shape"]))
    return (), ()


def _shapes(text: str) -> tuple[Sizes, Sizes]:
    shape = tuple(int(number) for number in re.findall(r"\d{1,18}", text))
    return (shape,), (shape,)


# ``Rank 0 is running collective: CollectiveFingerPrint(…), but Rank 3 is running collective: …``,
# of TORCH_DISTRIBUTED_DEBUG=DETAIL.

_FINGERPRINT: Final = re.compile(
    r"(?:Rank (?P<rank>\d{1,6}) is running (?:inconsistent )?collective: )?"
    r"CollectiveFingerPrint\((?:SequenceNumber=(?P<seq>\d{1,18})(?:, ?)?)?OpType=(?P<op>\w{1,40})"
    r"(?:, ?TensorShape=\[(?P<shape>[\d, ]{0,200})\])?(?:, ?TensorDtypes=(?P<dtype>\w{1,20}))?"
)


def fingerprint_reports(line: str, group: GroupName, place: int) -> Iterator[GroupReport]:
    """Yield what the debug wrapper says of the calls of two ranks that differ.

    It has asked all ranks of the group, so that all came to this point. Where their numbers differ,
    they have not come to one call.
    """
    found = list(_FINGERPRINT.finditer(line))[:2]
    numbers = {match["seq"] for match in found}
    for match in found:
        if match["rank"] is None:
            continue
        op = op_of(match["op"])
        # The wrapper compares shapes of every operation that it tells them of.
        inputs, outputs = _shapes(match["shape"]) if match["shape"] is not None else ((), ())
        yield GroupReport(
            group=group,
            backend="nccl",
            own_place=place,
            place=int(match["rank"]),
            op=op,
            seq=int(match["seq"]) if match["seq"] else None,
            input_sizes=inputs,
            output_sizes=outputs,
            dtypes=(dtype_name(match["dtype"]),) if match["dtype"] else (),
            is_whole=len(numbers) == 1 and len(found) > 1,
        )


def writer_of_fingerprint(line: str) -> int | None:
    """Return the place in its group of the rank that found calls to differ: it is told first."""
    match = _FINGERPRINT.search(line)
    return int(match["rank"]) if match is not None and match["rank"] else None


# The report of TORCH_NCCL_DESYNC_DEBUG: several lines, of all ranks of the group.

_TIMED_OUT: Final = re.compile(r"\[(\d{1,6})\] Timeout at collective: (\w{1,40}), #(\d{1,18})")
_LAGGING: Final = re.compile(
    r"\[([\d, ]{1,4000})\] (joined but didn't finish|finished) collective #(\d{1,18})"
)
_NEVER: Final = re.compile(r"ranks \[([\d, ]{1,4000})\] are the lagging ranks")
_SNAPSHOT: Final = re.compile(r"#(\d{1,18}) (started|finished) ranks:")
_LATEST: Final = re.compile(r"\[([\d, ]{1,4000})\] (started|finished) (\w{1,40})$")


class DesyncReport:
    """Reads the lines of one writer; the group is the one that it last named."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._head: tuple[int, str] | None = None

    def take(self, line: str, group: GroupName, place: int) -> Iterator[GroupReport]:
        """Yield what a line says of ranks of the group."""
        if match := _SNAPSHOT.search(line):
            self._head = int(match[1]), match[2]
        elif match := _TIMED_OUT.search(line):
            yield _latest(group, place, int(match[1]), match[3], match[2])
        elif match := _LAGGING.search(line):
            for other in _places(match[1]):
                is_in = match[2] != "finished"
                yield _latest(group, place, other, match[3], "" if is_in else None)
        elif match := _NEVER.search(line):
            for other in _places(match[1]):
                yield GroupReport(group=group, own_place=place, place=other, enqueued=0)
        elif (match := _LATEST.search(line.rstrip())) and self._head is not None:
            seq, verb = self._head
            for other in _places(match[1]) if verb == match[2] else ():
                op = match[3] if verb == "started" else None
                yield _latest(group, place, other, str(seq), op)


def _places(text: str) -> Iterator[int]:
    return (int(number) for number in re.findall(r"\d{1,6}", text))


def _latest(group: GroupName, own: int, place: int, seq: str, op: str | None) -> GroupReport:
    """Return that a rank is in a call, of a kind that may not be told (""), or has left it."""
    number = int(seq)
    return GroupReport(
        group=group,
        own_place=own,
        place=place,
        op=op_of(op) if op else "",
        seq=number if op else None,
        enqueued=number,
        completed=number if op is None else number - 1,
    )
