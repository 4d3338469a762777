"""A script that ends by `os._exit`, which runs no exit handler: it has finished, not died."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import ClassVar

from distdiag.events.base import Frame
from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.call_sites import caller, frames_of
from distdiag.record.recorder import Recorder

# The end of a process, without what the interpreter would still do.


def leave(exit_status: int) -> None:
    """End the process with another status than the interpreter would."""
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(exit_status)


# The probe that sees a hard exit.


class HardExit(Probe):
    """Tells of the exit status, and of the line that asked for it, before the process is gone."""

    name: ClassVar[str] = "hard-exit"

    def __init__(
        self, recorder: Recorder, *, before_exit: Callable[[int, tuple[Frame, ...]], None]
    ) -> None:
        """Call `before_exit` with status and stack, unless the end was reported already."""
        super().__init__(recorder)
        self._before_exit = before_exit

    def _install(self) -> None:
        self._patches.wrap(os, "_exit", self._leaving)

    def _leaving(self, original: AnyCallable) -> AnyCallable:
        def leave(status: int) -> None:
            # In a forked child the recorder is closed: its end is not that of the rank.
            if not self.is_off:
                with self.guard:
                    frames = frames_of(caller(), self.recorder.main_script)
                    self._before_exit(status & 0xFF, frames)
            original(status)

        return leave
