"""What NCCL's process group, gloo and the store write to logs when something is stuck.

The texts are those of torch 2.0 to 2.14; numbers and names in them become values.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from distdiag.event import Value

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
