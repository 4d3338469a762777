"""What the NCCL watchdog, gloo and the store said in the logs of a training run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distdiag.dumps.log_lines import Line, Speaker, lines_with
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MOST_FRAMES, python_frame
from distdiag.events.base import Frame, Value
from distdiag.events.stacks import Observed

# What NCCL's process group, gloo and the store write to logs when something is stuck.
#
# The texts are those of torch 2.0 to 2.14; numbers and names in them become values.

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


_COUNTS: Final = (
    r"last enqueued (?:NCCL )?work: (?P<last_enqueued>-?\d{1,18}), "
    r"last completed (?:NCCL )?work: (?P<last_completed>-?\d{1,18})"
)

MESSAGES: Final = (
    _message(
        "timeout",
        "nccl-log",
        r"[Ww]atchdog caught collective operation timeout: WorkNCCL\("
        r"(?:SeqNum=(?P<seq>\d{1,18}), )?OpType=(?P<op>\w{1,40})"
        r"(?:, NumelIn=(?P<numel_in>\d{1,18}), NumelOut=(?P<numel_out>\d{1,18}))?"
        r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
        r", Timeout\(ms\)=(?P<timeout_ms>\d{1,18})\) ran for (?P<ran_ms>\d{1,18}) milliseconds",
    ),
    _message(
        "status",
        "nccl-log",
        r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): "
        r"(?P<seq>-?\d{1,18}),?(?: PG status:)? " + _COUNTS,
    ),
    _message(
        "dump-signal",
        "nccl-log",
        r"Received a dump signal due to a collective timeout from {1,2}"
        r"(?:rank (?P<from_rank>\d{1,6})|this local rank).{1,80}?Last enqueued NCCL work: "
        r"(?P<last_enqueued>-?\d{1,18}), last completed NCCL work: (?P<last_completed>-?\d{1,18})",
    ),
    _message(
        "watchdog-stuck", "nccl-log", r"[Ww]atchdog got stuck for (?P<stuck_s>\d{1,9}) seconds"
    ),
    _message("watchdog-stuck", "nccl-log", r"Heartbeat monitor timed out"),
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
        "monitored-barrier",
        "gloo-log",
        r"Ranks? (?P<missing_ranks>\d[\d, ]{0,200}?) failed to pass monitoredBarrier"
        r"(?: in (?P<timeout_ms>\d{1,18}) ms)?",
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


def sighting(line: str) -> Sighting | None:
    """Return the first message that a line holds, or None."""
    for kind, source, pattern in MESSAGES:
        if match := pattern.search(line):
            values = {name: _value(text) for name, text in match.groupdict().items() if text}
            return Sighting(kind, source, match.group()[:_LONGEST_TEXT], values)
    return None


def _value(text: str) -> Value:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() else text.strip()


# The reader of whole logs.

MOST_SIGHTINGS: Final = 100
"""So many different messages are kept of each rank."""

_STACK_HEAD: Final = "Stack trace of the failed collective:"
# Every line that holds one of the messages has one of these words.
_WORDS: Final = (
    b"atchdog",
    b"Heartbeat monitor",
    b"dump signal",
    b"NCCL work",
    b"NCCL WARN",
    b"NCCL error",
    b"NCCL communicator",
    b"monitoredBarrier",
    b" by peer",
    b"Timed out ",
    b"timeout after ",
)
# ``[PG ID 0 PG GUID 0(default_pg) Rank 3]``, ``[PG 1 Rank 0]``, ``[Rank 3]``: the rank is that
# within the group.
_GROUP: Final = re.compile(
    r"\[(?:PG (?:ID )?(?P<id>\w{1,80})(?: PG GUID (?P<guid>[^\s()]{1,80}))?"
    r" ?(?:\((?P<desc>[^()]{0,120})\) ?)?)?(?: )?Rank (?P<rank>\d{1,6})\]"
)
_DEFAULT: Final = frozenset({"default_pg", "0"})
_STACK_LINE: Final = re.compile(r"#(\d{1,4}) (\S.{0,300}?) from (.{1,1000}):(\d{1,9})$")


@dataclass
class _Seen:
    """What was seen of one rank: messages, each once, and where its collective was called."""

    speaker: Speaker
    by_key: dict[tuple[Value, ...], Sighting] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

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


def _is_timeout(found: Sighting, seq: Value) -> bool:
    return found.kind == "timeout" and found.values.get("seq") == seq


class NcclLog(DumpReader):
    """Read the messages about stuck and failed collectives in logs."""

    name = "nccl-log"

    def recognises(self, dump: Dump) -> bool:
        """Look for words of the messages."""
        return any(word in dump.data for word in _WORDS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield what was said of each rank, in the order in which it was said first."""
        seen: dict[Speaker, _Seen] = {}
        stack = _FailedCollective()
        for line in lines_with(dump, (*_WORDS, _STACK_HEAD.encode(), b"\n#")):
            if line.text.startswith("#") and stack.take(line.text):
                continue
            if _STACK_HEAD in line.text:
                stack.begin(_seen(seen, line.speaker).frames)
            elif found := sighting(line.text):
                _seen(seen, _attributed(line, found)).add(found)
        if len(seen) > 1:
            seen.pop(Speaker(), None)  # what nobody signed repeats what somebody did
        for rank in seen.values():
            if rank.by_key:
                yield self._dump(dump.path, rank)

    def _dump(self, path: str, seen: _Seen) -> RankDump:
        rank = UNKNOWN_RANK if seen.speaker.rank is None else seen.speaker.rank
        return RankDump(
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


def _seen(seen: dict[Speaker, _Seen], speaker: Speaker) -> _Seen:
    return seen.setdefault(speaker, _Seen(speaker))


def _attributed(line: Line, found: Sighting) -> Speaker:
    """Add the group to the values; return whose message it is."""
    group = _GROUP.search(line.text)
    if group is None:
        return line.speaker
    name = group["desc"] or group["guid"] or group["id"]
    if name:
        found.values.update(group=name, group_rank=int(group["rank"]))
    is_default = name is None or name in _DEFAULT
    if line.speaker.rank is not None or line.speaker.local_rank is not None or not is_default:
        return line.speaker
    return Speaker(int(group["rank"]))


def _location(found: Sighting, frames: list[Frame]) -> dict[str, Value]:
    """Return the line of user code that called what timed out, where the log tells it."""
    user = next((frame for frame in frames if frame.user), None)
    if found.kind != "timeout" or found.source != "nccl-log" or user is None:
        return {}
    return {"file": user.file, "line": user.line, "function": user.function}
