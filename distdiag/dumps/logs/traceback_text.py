"""Python tracebacks in logs, those of several ranks in one log included."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from distdiag.checks.shared.failures import says_peer_is_gone
from distdiag.dumps.log_lines import Log, Speaker, open_log
from distdiag.dumps.log_prefixes import LONGEST_PREFIX, speaker_in, untimed
from distdiag.dumps.logs.group_messages import rank_of_process
from distdiag.dumps.logs.survival import (
    SURVIVED_AFTER,
    has_failed,
    has_survived,
    restarted_at,
)
from distdiag.dumps.logs.tracebacks import (
    BOX_END,
    BOX_HEAD,
    HEAD,
    NAMED_EXCEPTION,
    Chain,
    chain_at,
    text_of,
)
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MAIN_THREAD
from distdiag.events.lifecycle import Raised

__all__ = ["SURVIVED_AFTER", "TracebackText"]

MOST_THREADS: Final = 100
_FRAME: Final = b'  File "'
_LISTING: Final = "most recent call"
"""What stands above frames that are no part of a traceback, or are of one of which it is known."""

_THREAD: Final = re.compile(r"Exception in thread (.{1,200}?)(?: \(.*\))?:")
_IGNORED: Final = "Exception ignored in"
# torch.multiprocessing.spawn, in the parent's exception.
_SPAWNED: Final = re.compile(r"-- Process (\d{1,6}) terminated with the following error:")
# multiprocessing.Process
_PROCESS: Final = re.compile(r"Process ((?:\w{1,20}Process|\w{1,40})-\d{1,6}(?::\d{1,6})*):$")
# loguru
_CAUGHT: Final = re.compile(
    r"An error has been caught in function '.{1,200}', "
    r"process '(\w{1,20}Process-\d{1,6}(?::\d{1,6})*)' \((\d{1,9})\)"
)
# Exceptions of the launcher, which only say that a rank failed.
_LAUNCHER: Final = frozenset(
    {
        "ActorDiedError",
        "ActorUnavailableError",
        "CalledProcessError",
        "ChildFailedError",
        "NodeDiedError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "RayActorError",
        "SignalException",
        "WorkerCrashedError",
    }
)
# Launchers that raise a general exception for the same.
_LAUNCHERS_FILE: Final = re.compile(
    r"/(?:accelerate/(?:commands|test_utils)/|deepspeed/launcher/|torch/distributed/(?:run|launch)\.py"
    r"|torch/multiprocessing/spawn\.py)"
)
# In torchrun's summary the traceback that `record` has kept is a field like the exit code.
_FIELD: Final = re.compile(r"\s{0,8}traceback : ")
_FIELD_WIDTH: Final = 24
_ENTRY_BYTES: Final = 600
_RANK: Final = re.compile(r"\brank\s{0,8}: (\d{1,6}) \(local_rank: (\d{1,6})\)")
# The prefix of a logger: brackets first; and a word by which it tells of a failure.
_LOG_HEAD: Final = re.compile(r"(?:[\[(][^\[\]()]{1,120}[\])] ?){1,4}")
# A line of torch's C++. What stands below it is somebody else's, unless it says the same.
_NATIVE: Final = re.compile(r"\[?[WEIF]\d{0,4} [^\[\]]{0,60}\.(?:cpp|cc|hpp|h|cu):\d{1,6}\]")
_FAILS: Final = re.compile(r"\b(?:ERROR|CRITICAL|[Ee]xception|[Ff]ail(?:ed|ure)|[Cc]rashed)\b")


class TracebackText(DumpReader):
    """Read the exceptions that nobody caught.

    Of each process it is the last traceback: a process goes on after earlier ones, which somebody
    caught and logged. Exceptions that ended a thread are told with the name of the thread.
    """

    name = "traceback-text"

    def recognises(self, dump: Dump) -> bool:
        """Look for the head of a traceback, or for a frame, as the head may be cut off."""
        return any(sign in dump.data for sign in (HEAD.encode(), _FRAME, BOX_END.encode()))

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the exceptions of each process."""
        log = open_log(dump)
        failed = has_failed(log)
        for speaker, spans in log.streams().items():
            for found in _Stream(log, log.resolved(speaker), spans, failed=failed).raised():
                owner = found.owner
                yield RankDump(
                    rank=owner.rank,
                    local_rank=owner.local_rank,
                    label=owner.name,
                    node=owner.label if owner.local_rank is not None else "",
                    pid=owner.pid,
                    place=found.place,
                    events=(found.event,),
                    path=dump.path,
                    source=self.name,
                )


def lines_survived(log: Log) -> frozenset[int]:
    """Return where the lines begin of tracebacks that somebody caught, or that Python ignored."""
    failed = has_failed(log)
    found: set[int] = set()
    for speaker, spans in log.streams().items():
        for part in _Stream(log, log.resolved(speaker), spans, failed=failed).survived():
            for start in part:
                low = max(0, start - LONGEST_PREFIX)
                ends = (log.data.rfind(end, low, start) for end in (b"\n", b"\r"))
                found.add(max(low, *(end + 1 for end in ends)))
    return frozenset(found)


@dataclass(frozen=True)
class _Found:
    owner: Speaker
    event: Raised
    place: int


class _Stream:
    """The lines of one speaker, in which tracebacks are looked for."""

    def __init__(self, log: Log, speaker: Speaker, spans: array[int], *, failed: bool) -> None:
        self._log = log
        self._speaker = speaker
        self._spans = spans
        self._failed = failed
        self._restarted_at = restarted_at(log)

    def raised(self) -> Iterator[_Found]:
        """Yield what ended the process, and what ended threads of it."""
        is_pure = self._speaker != Speaker()
        last: dict[Speaker, list[Chain]] = {}
        threads: list[tuple[str, Chain]] = []
        for chain in self._chains(is_pure=is_pure):
            thread = _THREAD.match(chain.before)
            if not chain.last.type or chain.before.startswith(_IGNORED) or _is_launchers(chain):
                continue
            if thread is not None:
                threads.append((thread[1], chain))
            else:
                last.setdefault(self._owner(chain), []).append(chain)
        for owner, found in last.items():
            chain = self._cause_of(found) if owner == Speaker() else found[-1]
            # A driver goes on, or not, after what it passes on; its worker does not.
            if owner.label != self._speaker.label or not self._has_survived(chain):
                yield self._found(owner, chain, MAIN_THREAD)
        for name, chain in threads[:MOST_THREADS]:
            yield self._found(self._speaker, chain, name)

    def survived(self) -> Iterator[array[int]]:
        """Yield where the lines begin of each traceback after which the process went on."""
        for chain in self._chains(is_pure=self._speaker != Speaker()):
            if chain.before.startswith(_IGNORED) or self._has_survived(chain):
                yield self._spans[2 * chain.start : 2 * chain.end : 2]

    def _cause_of(self, found: list[Chain]) -> Chain:
        """Return the exception that counts among those that nobody signed.

        Of one process it is the last. Where a launcher saw a failure they may be those of several
        ranks: then it is the first that is no consequence of another, if none was caught.
        """
        if not self._failed:
            return found[-1]
        own = (c for c in found if not says_peer_is_gone(c.last.type, c.last.message))
        return next((c for c in own if not self._has_survived(c)), found[-1])

    def _chains(self, *, is_pure: bool) -> Iterator[Chain]:
        """Yield the tracebacks, without a look at the lines that belong to none."""
        spans = self._spans
        starts = spans[::2]
        end = 0
        if (cut := self._without_head(starts, is_pure=is_pure)) is not None:
            yield cut
            end = cut.end
        for place in self._log.places(HEAD.encode()):
            number = bisect_right(starts, place) - 1
            if number < end or place >= spans[2 * number + 1]:
                continue  # in a traceback that has been read, or in a line of somebody else
            above = next(self._lines(number - 1, number), "") if number > end else ""
            chain = chain_at(self._lines(number), above, number, is_pure=is_pure)
            yield chain
            end = max(chain.end, number + 1)

    def _without_head(self, starts: array[int], *, is_pure: bool) -> Chain | None:
        """Return the traceback that the lines begin within, as those of a log that was cut do."""
        head = next(self._own_lines(HEAD.encode(), starts), len(starts))
        number = next(self._own_lines(_FRAME, starts), head)
        box_end = next(self._own_lines(BOX_END.encode(), starts), head)
        is_boxed = box_end < number
        if is_boxed:
            number = self._begin_of_box(box_end)
        if number >= head:
            return None
        above = next(self._lines(number - 1, number), "") if number else ""
        cut_head = BOX_HEAD if is_boxed else f"{HEAD}:"
        chain = chain_at(self._lines(number), above, number, is_pure=is_pure, head=cut_head)
        is_whole = chain.end <= head and NAMED_EXCEPTION.match(chain.last.type)
        has_frames = chain.last.frames or is_boxed
        return chain if is_whole and has_frames and _LISTING not in above else None

    def _begin_of_box(self, end: int) -> int:
        """Return the first line of those that rich drew above the end of a box."""
        number = end
        while number and next(self._lines(number - 1, number), "").startswith("│"):
            number -= 1
        return number

    def _own_lines(self, word: bytes, starts: array[int]) -> Iterator[int]:
        """Yield the numbers of the lines of this stream that hold a word."""
        for place in self._log.places(word):
            number = bisect_right(starts, place) - 1
            if number >= 0 and place < self._spans[2 * number + 1]:
                yield number

    def _owner(self, chain: Chain) -> Speaker:
        if spawned := _SPAWNED.match(chain.before):
            return Speaker(self._speaker.rank, int(spawned[1]), self._speaker.label)
        if chain.last.worker:
            return Speaker(None, None, chain.last.worker)
        if self._speaker == Speaker() and (signed := self._signed(chain)) is not None:
            return signed
        if self._speaker == Speaker() and (told := rank_of_process(chain.last.message)) is not None:
            return Speaker(told[1])
        if self._speaker == Speaker() and (process := _PROCESS.match(chain.before)):
            return Speaker(None, None, process[1])
        if self._speaker == Speaker() and (caught := _CAUGHT.search(chain.before)):
            return Speaker(None, None, f"{caught[1]} pid={caught[2]}")
        return self._speaker

    def _signed(self, chain: Chain) -> Speaker | None:
        """Return whose traceback it is by what stands before it, in its line or in the one above.

        Loggers put their prefix before the first line of a message only; torchrun's summary has
        the traceback among the fields of a rank.
        """
        start = self._spans[2 * chain.start]
        above = self._log.text(*self._log.before(start))
        if _FIELD.match(self._log.text(start, start + _FIELD_WIDTH)):
            fields = self._log.text(max(0, start - _ENTRY_BYTES), start)
            found = _RANK.findall(fields)
            return Speaker(int(found[-1][0]), int(found[-1][1])) if found else None
        own = self._log.text(start, self._spans[2 * chain.start + 1]).partition(HEAD)[0]
        # What stands before the head in its own line was written by whom that line is of.
        for text in (own,) if own.strip() else (above,):
            is_other = _NATIVE.match(text) and chain.last.message.partition("\n")[0] not in text
            head = None if is_other else _LOG_HEAD.match(text)
            if head is not None and _FAILS.search(text):
                speaker = self._log.named(speaker_in(untimed(head[0])))
                if speaker != Speaker():
                    return speaker
        return None

    def _has_survived(self, chain: Chain) -> bool:
        if self._spans[2 * chain.start] < self._restarted_at:
            return True
        return has_survived(
            before=lambda: self._lines(max(0, chain.start - SURVIVED_AFTER), chain.start),
            message=lambda: self._lines(chain.raised, chain.end),
            after=lambda: self._lines(chain.end, chain.end + 2 * SURVIVED_AFTER),
            is_known=self._speaker != Speaker(),
            failed=self._failed,
        )

    def _lines(self, first: int = 0, last: int | None = None) -> Iterator[str]:
        spans, text = self._spans, self._log.text
        stop = len(spans) if last is None else min(len(spans), 2 * last)
        for at in range(2 * first, stop, 2):
            yield text(spans[at], spans[at + 1])

    def _found(self, owner: Speaker, chain: Chain, thread: str) -> _Found:
        place = self._spans[2 * chain.start]
        event = Raised(
            rank=UNKNOWN_RANK if owner.rank is None else owner.rank,
            seq=-1,
            time_ns=self._log.time_ns(place),
            type=chain.last.type,
            message=chain.last.message,
            frames=tuple(chain.last.frames),
            traceback=text_of(chain.text),
            thread=thread,
        )
        return _Found(owner, event, place)


def _is_launchers(chain: Chain) -> bool:
    inner = chain.last.frames[0].file if chain.last.frames else ""
    return chain.last.type.rpartition(".")[2] in _LAUNCHER or bool(_LAUNCHERS_FILE.search(inner))
