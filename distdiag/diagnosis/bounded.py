"""Work on what strangers wrote in a process that may hang or die, until a deadline."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

MOST_MEMORY: Final = 8 << 30
"""So much address space may the process take, in bytes, as those of `distdiag analyze`."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the work; `what` says in a few words what is done."""

    what: str
    work: Work


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that gave nothing, and why."""

    why: str


def run_steps(steps: Sequence[Step], deadline_s: float) -> Iterator[tuple[Step, object]]:
    """Run steps in order, each in a child process, and yield what each returns, or `Failed`.

    `deadline_s` is by the monotonic clock. One child does all the steps; where it dies, another
    goes on behind the step that killed it. What the child started ends with it.
    """
    rest = list(steps)
    while rest:
        child = _Child(rest)
        try:
            while rest:
                answer = child.answer(deadline_s)
                if isinstance(answer, _TimeUp):
                    yield from ((step, Failed("the time was up")) for step in rest)
                    return
                yield rest.pop(0), answer
                if isinstance(answer, Failed):
                    break
        finally:
            child.end()


class _TimeUp:
    pass


class _Child:
    """One process that works on steps and sends what comes of each."""

    def __init__(self, steps: Sequence[Step]) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=_work, args=(steps, sender))
        self._process.start()
        sender.close()

    def answer(self, deadline_s: float) -> object:
        """Return what the next step gives, `Failed` if the child died, `_TimeUp` if too late."""
        if not self._receiver.poll(max(0.0, deadline_s - time.monotonic())):
            return _TimeUp()
        try:
            answer: object = self._receiver.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            died = f"signal {-code}" if code < 0 else f"status {code}"
            return Failed(f"it took too much memory, or failed (its process ended with {died})")
        return answer

    def end(self) -> None:
        """End the child and all that it started."""
        self._receiver.close()
        if self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()  # it has no group of its own yet
        self._process.join()


def _work(steps: Sequence[Step], sender: Connection) -> None:
    os.setsid()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for step in steps:
        try:
            answer = step.work()
        except (MemoryError, RecursionError):
            answer = Failed("it is too large, or nested too deeply")
            sender.send(answer)
            return
        sender.send(answer)
