"""Whether the device is done with the collectives that the program has waited for.

On GPUs a wait for a collective holds up the stream, and the host goes on: a file that it opens then
may not be there yet. How hosts wait for devices cannot be listed (`.item()` and `.cpu()`, masks as
indices, prints, …), but whether they have can be asked, which takes no time and waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from distdiag.events.files import HostSynced
from distdiag.probes.base import Probe
from distdiag.record.guard import attempt
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class HostWaits(Probe):
    """Writes down, before what could be ordered by it, that the device has caught up."""

    name: ClassVar[str] = "host-waits"

    def __init__(
        self,
        recorder: Recorder,
        waited: Signal[[]],
        file_access: Signal[[]],
        before_sync: Signal[[bool]],
    ) -> None:
        super().__init__(recorder)
        self._waited = waited
        self._file_access = file_access
        self._before_sync = before_sync
        self._marks: dict[tuple[int, int], Any] = {}
        """By device and stream, an event behind the last call that it waits for."""
        self._is_behind = False

    def _install(self) -> None:
        if torch.version.cuda is None and torch.version.hip is None:
            return
        # From here on a wait for a collective on a stream is not taken for one of the host.
        self.recorder.event(HostSynced, api="start")
        self._subscribe(self._waited, self._after_wait)
        self._subscribe(self._file_access, self._look)
        self._subscribe(self._before_sync, self._look_for_host)

    def _after_wait(self) -> None:
        if not self.off:
            attempt(self.fail, self._mark)

    def _mark(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        if torch.cuda.is_current_stream_capturing():
            return  # what is recorded now runs later, and again and again
        stream = torch.cuda.current_stream()
        key = (stream.device_index, stream.stream_id)
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(stream)
        self._is_behind = True

    def _look_for_host(self, by_host: bool) -> None:
        # What runs on the device comes after what that has waited for, whatever the host knows.
        if by_host:
            self._look()

    def _look(self) -> None:
        # Another thread may be recording a graph, which no question of ours may disturb.
        if self._is_behind and not self.is_off and self.recorder.here.context.name is None:
            attempt(self.fail, self._ask)

    def _ask(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if all(mark.query() for mark in self._marks.values()):
            self._is_behind = False
            self.recorder.event(HostSynced, api="torch.cuda.Event.query")
