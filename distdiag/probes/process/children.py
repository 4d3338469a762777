"""Processes that a rank starts by `multiprocessing`: which of them have ended badly.

A pool asks for that by itself and puts another process in the place of the dead one, whose task is
lost: afterwards nothing can be seen of it from outside.
"""

from __future__ import annotations

import os
import sys
from typing import ClassVar, Final

from distdiag.events.lifecycle import ChildEnded
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

MOST_ENDS: Final = 100
"""A pool whose workers die at once starts new ones for ever."""


class ChildEnds(Probe):
    """Records when `multiprocessing` notices that a process of its has not ended with status 0."""

    name: ClassVar[str] = "child-processes"

    def __init__(self, recorder: Recorder) -> None:
        """Know of none."""
        super().__init__(recorder)
        self._pid = os.getpid()
        self._num_ends = 0

    def _install(self) -> None:
        kind = sys.modules["multiprocessing.popen_fork"].Popen
        self._patches.wrap(kind, "poll", self._polling)

    def _polling(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def poll(self_: Untyped, *args: object, **kwargs: object) -> object:
            before = self_.returncode
            status = original(self_, *args, **kwargs)
            if status and before is None and not self.is_off:
                self._ended(self_.pid, status)
            return status

        return poll

    def _ended(self, pid: int, status: object) -> None:
        with self.guard:
            # A process that was forked from this rank is no rank.
            if isinstance(status, int) and os.getpid() == self._pid and self._num_ends < MOST_ENDS:
                self._num_ends += 1
                self.recorder.event(ChildEnded, pid=pid, status=status)
