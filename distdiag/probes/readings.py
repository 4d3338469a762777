"""Contents that are being read: on a GPU they are there only some time later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from distdiag.event import CallSite
from distdiag.model_event import Content, Moment
from distdiag.probes.tensor_content import Pending, contents


@dataclass(slots=True)
class Reading:
    """What was asked for, and what came of it."""

    model: str
    moment: Moment
    step: int
    site: CallSite
    contents: list[Content | None] = field(default_factory=list)


class Readings:
    """Readings in the order in which they were asked for."""

    def __init__(self) -> None:
        """Nothing is being read."""
        self._waiting: deque[tuple[Reading, Pending, list[int]]] = deque()

    def add(self, reading: Reading, tensors: Sequence[torch.Tensor | None]) -> None:
        """Begin to read; None stands for a tensor that is not there."""
        places = [place for place, tensor in enumerate(tensors) if tensor is not None]
        reading.contents = [None] * len(tensors)
        pending = contents([tensor for tensor in tensors if tensor is not None])
        self._waiting.append((reading, pending, places))

    def guard(self) -> None:
        """Let what is written next on the device wait until it was read; the host does not."""
        for _, pending, _ in self._waiting:
            pending.guard()

    def take(self) -> list[Reading]:
        """Return what has been read since."""
        return self._finished(may_wait=False)

    def wait(self) -> list[Reading]:
        """Return all that was asked for."""
        return self._finished(may_wait=True)

    def _finished(self, *, may_wait: bool) -> list[Reading]:
        done = []
        while self._waiting:
            reading, pending, places = self._waiting[0]
            found = pending.wait() if may_wait else pending.take()
            if found is None:
                break
            for place, content in zip(places, found, strict=True):
                reading.contents[place] = None if content is None else Content(*content)
            done.append(reading)
            self._waiting.popleft()
        return done
