"""Sees that what is saved changes while it is written: another thread goes on training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import ClassVar, Final

import torch

from distdiag.events.base import CallSite
from distdiag.events.checkpoints import ChangedWhileSaved
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guard

_DEEPEST: Final = 8
"""An optimizer's state is four mappings deep in a checkpoint of parts; as many are to spare."""
_MOST_TENSORS: Final = 4096
_MOST_NAMES: Final = 3
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

_Version = tuple[str, torch.Tensor, int]


class LiveSaves(Probe):
    """Writes down tensors that were changed in place between begin and end of a `torch.save`.

    The versions of the tensors tell, which are numbers on the host: no value is read.
    """

    name: ClassVar[str] = "live-saves"

    def _install(self) -> None:
        self._patches.wrap_everywhere(torch.serialization, "save", self._around)

    def _around(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def save(*args: object, **kwargs: object) -> object:
            if self.is_off or threading.active_count() == 1:
                return original(*args, **kwargs)
            before: list[_Version] = []
            with guard(self.fail):
                state = args[0] if args else kwargs.get("obj")
                before = [
                    (path, tensor, tensor._version)
                    for path, tensor in islice(_tensors(state, "", _DEEPEST), _MOST_TENSORS)
                ]
            result = original(*args, **kwargs)
            with guard(self.fail):
                self._compare(before, sys._getframe(1))
            return result

        return save

    def _compare(self, before: list[_Version], frame: FrameType) -> None:
        changed = [path for path, tensor, version in before if tensor._version > version]
        if changed:
            self.recorder.event(
                ChangedWhileSaved,
                names=tuple(changed[:_MOST_NAMES]),
                num_changed=len(changed),
                num_saved=len(before),
                thread=self.recorder.here.context.name,
                site=CallSite(frames_of(frame, self.recorder.main_script)),
            )


def _tensors(value: object, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if type(value) in _PLAIN:
        assert isinstance(value, torch.Tensor)
        if not value.is_inference():
            yield path, value
    elif depth and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{path}.{key}" if path else str(key), depth - 1)
