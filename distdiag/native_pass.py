"""A second look at hung ranks, with native frames: slow, so it runs beside everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from distdiag.event import Stacks, ThreadStack
from distdiag.finding import Evidence, Finding, Severity
from distdiag.ranks import RankSet

MOST_RANKS: Final = 8
"""Each rank stands still while it is read, and ranks that hang together mostly look alike."""
MOST_FRAMES: Final = 12

_MAIN: Final = "MainThread"


class NativePass:
    """Takes the stacks once, on a thread of its own."""

    def __init__(self, look: Callable[[Iterable[int]], tuple[Stacks, ...]]) -> None:
        """Take them by `look`, which is given the ranks."""
        self._look = look
        self._thread: threading.Thread | None = None
        self.stacks: tuple[Stacks, ...] = ()

    def start(self, ranks: Iterable[int]) -> None:
        """Begin, unless it was begun before."""
        if self._thread is None:
            few = sorted(ranks)[:MOST_RANKS]
            # A daemon: a reading that never ends must not keep the monitor from ending.
            self._thread = threading.Thread(target=self._run, args=(few,), daemon=True)
            self._thread.start()

    def _run(self, ranks: list[int]) -> None:
        self.stacks = self._look(ranks)

    def added_to(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Return the findings, with what was seen of their ranks as further evidence."""
        return tuple(self._extended(finding) for finding in findings)

    def _extended(self, finding: Finding) -> Finding:
        if finding.severity is Severity.INFO or not self.stacks:
            return finding
        seen = tuple(
            Evidence(ranks=RankSet([each.rank]), summary=f"native frames: {_told(each)}")
            for each in self.stacks
            if each.rank in finding.ranks
        )
        return msgspec.structs.replace(finding, evidence=finding.evidence + seen)


def _told(stacks: Stacks) -> str:
    if stacks.error:
        return f"nothing could be seen: {stacks.error}"
    main = [thread for thread in stacks.threads if thread.name == _MAIN]
    return _chain(next(iter(main or stacks.threads)))


def _chain(thread: ThreadStack) -> str:
    names = [frame.function for frame in thread.frames[:MOST_FRAMES]]
    more = " < …" if len(thread.frames) > MOST_FRAMES else ""
    return " < ".join(names) + more
