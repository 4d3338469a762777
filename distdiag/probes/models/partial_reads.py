"""Numbers that a program takes out of DTensors whose reduction is still to come."""

import sys
from functools import partial
from typing import Any, ClassVar, Final

from torch.distributed.tensor import DTensor

from distdiag.events.base import CallSite
from distdiag.events.models import PartialRead
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded, guarded_if
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_METHODS: Final = ("item", "__float__")
_MOST_PLACES: Final = 64


class PartialReads(Probe):
    """Writes each place of the program down once."""

    name: ClassVar[str] = "partial-reads"

    def __init__(
        self, recorder: Recorder, shared: Signal[Any, Any, str], step_ended: Signal[[]]
    ) -> None:
        super().__init__(recorder)
        self._shared = shared
        self._step_ended = step_ended
        self._seen: set[tuple[int, int]] = set()
        self._waiting: list[dict[str, Any]] = []

    def _install(self) -> None:
        for name in _METHODS:
            self._patches.add(DTensor, name, self._call_before(partial(self._look, name)))
        self._subscribe(self._shared, self._before_share)
        self._subscribe(self._step_ended, self.flush)

    @guarded
    def _look(self, api: str, tensor: Untyped, /, *_: object, **__: object) -> None:
        if not any(placement.is_partial() for placement in tensor.placements):
            return
        frame = sys._getframe(3)
        place = (id(frame.f_code), frame.f_lasti)
        if place in self._seen or len(self._seen) >= _MOST_PLACES:
            return
        self._seen.add(place)
        self._waiting.append(
            {
                "api": api.strip("_"),
                "placements": tuple(str(placement) for placement in tensor.placements),
                "site": CallSite(frames_of(frame, self.recorder.main_script)),
            }
        )

    @guarded_if("_waiting")
    def _before_share(self, *_: object) -> None:
        """Forget what was read: the program reduces the number itself."""
        self._waiting.clear()

    @guarded_if("_waiting")
    def flush(self) -> None:
        """Write down what was read and not reduced since."""
        while self._waiting:
            self.recorder.event(PartialRead, **self._waiting.pop(0))
