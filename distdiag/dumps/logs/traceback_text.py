"""Python tracebacks in logs, those of several ranks in one log included."""

import re
from collections.abc import Iterator
from typing import Final

from distdiag.dumps.log_lines import Speaker, streams
from distdiag.dumps.logs.tracebacks import HEAD, Chain, chains, text_of
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MAIN_THREAD
from distdiag.events.lifecycle import Raised

SURVIVED_AFTER: Final = 50
"""A process that wrote so many lines after a traceback has survived it."""

MOST_THREADS: Final = 100

_THREAD: Final = re.compile(r"Exception in thread (.{1,200}?)(?: \(.*\))?:")
_IGNORED: Final = "Exception ignored in"
# torch.multiprocessing.spawn, in the parent's exception.
_SPAWNED: Final = re.compile(r"-- Process (\d{1,6}) terminated with the following error:")
# Exceptions of the launcher, which only say that a rank failed.
_LAUNCHER: Final = frozenset(
    {"ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "CalledProcessError"}
)


class TracebackText(DumpReader):
    """Read the exceptions that nobody caught.

    Of each process it is the last traceback: a process goes on after earlier ones, which somebody
    caught and logged. Exceptions that ended a thread are told with the name of the thread.
    """

    name = "traceback-text"

    def recognises(self, dump: Dump) -> bool:
        """Look for the head of a traceback."""
        return HEAD.encode() in dump.data

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the exceptions of each process."""
        for speaker, lines in streams(dump):
            for owner, raised in _raised(speaker, lines()):
                yield RankDump(
                    rank=owner.rank,
                    local_rank=owner.local_rank,
                    events=(raised,),
                    path=dump.path,
                    source=self.name,
                )


def _raised(speaker: Speaker, lines: Iterator[str]) -> Iterator[tuple[Speaker, Raised]]:
    last: dict[Speaker, tuple[Chain, int]] = {}
    threads: list[tuple[str, Chain]] = []
    num_lines = 0
    for chain in chains(lines, is_pure=speaker.rank is not None):
        num_lines += chain.num_after
        thread = _THREAD.match(chain.before)
        if not chain.last.type or chain.before.startswith(_IGNORED) or _is_launchers(chain):
            continue
        if thread is not None:
            threads.append((thread[1], chain))
            continue
        spawned = _SPAWNED.match(chain.before)
        owner = Speaker(speaker.rank, int(spawned[1])) if spawned else speaker
        last[owner] = chain, num_lines
    for owner, (chain, place) in last.items():
        if num_lines - place + chain.num_after < SURVIVED_AFTER:
            yield owner, _event(owner, chain, MAIN_THREAD)
    for name, chain in threads[:MOST_THREADS]:
        yield speaker, _event(speaker, chain, name)


def _is_launchers(chain: Chain) -> bool:
    return chain.last.type.rpartition(".")[2] in _LAUNCHER


def _event(owner: Speaker, chain: Chain, thread: str) -> Raised:
    return Raised(
        rank=UNKNOWN_RANK if owner.rank is None else owner.rank,
        seq=-1,
        time_ns=0,
        type=chain.last.type,
        message=chain.last.message,
        frames=tuple(chain.last.frames),
        traceback=text_of(chain.text),
        thread=thread,
    )
