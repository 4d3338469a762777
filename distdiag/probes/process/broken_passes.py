"""Notices exceptions that went through a pass of the training; the program may have caught them."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final

import torch
from torch import nn
from torch.utils.data import dataloader

from distdiag.events.base import CallSite, Frame
from distdiag.events.lifecycle import BrokenPass
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import caller, is_own_file, site_here
from distdiag.probes.guard import guard
from distdiag.record.exception_text import message_of, plain, shortened
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal
from distdiag.record.user_code import is_user_file

_MOST_TOLD: Final = 16
_LONGEST_MESSAGE: Final = 400
"""The first lines say what it is; who raises it a hundred times says the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says."""

    forward_started: Signal[object, nn.Module, object]
    forward_ended: Signal[object, object]
    backward_ended: Signal[bool]


class BrokenPasses(Probe):
    """Looks at forward passes of wrapped models, backward passes, and what loaders are asked for.

    Of a forward pass only that it never ended is seen, when the next one begins.
    """

    name: ClassVar[str] = "broken-passes"

    def __init__(self, recorder: Recorder, moments: Moments) -> None:
        """Know of no pass yet."""
        super().__init__(recorder)
        self._moments = moments
        self._inside: tuple[object, int] | None = None
        self._num_told = 0

    def _install(self) -> None:
        self._subscribe(self._moments.forward_started, self._before_forward)
        self._subscribe(self._moments.forward_ended, self._after_forward)
        self._subscribe(self._moments.backward_ended, self._after_backward)
        self._patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._around_fetch)

    def _before_forward(self, forward: object, _: nn.Module, __: object) -> None:
        # Within one model others may be called; of these the outermost counts.
        before, self._inside = self._inside, (forward, self.recorder.step)
        if before is None or self.is_off or torch.compiler.is_compiling():
            return
        if before[0] is not forward:
            self._inside = before
            return
        with guard(self.fail):
            self._write("forward pass", None, before[1], site_here(self.recorder, caller()))

    def _after_forward(self, forward: object, _: object) -> None:
        if self._inside is not None and self._inside[0] is forward:
            self._inside = None

    def _after_backward(self, is_complete: bool) -> None:
        self._inside = None  # a model may be in it that is not called again
        if not is_complete and not self.is_off:
            with guard(self.fail):
                error = sys.exc_info()[1]
                _, frames = self.recorder.backward or ((), ())
                self._write("backward pass", error, self.recorder.step, CallSite(frames))

    def _around_fetch(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def next_batch(iterator: object) -> object:
            try:
                return original(iterator)
            except StopIteration:
                raise
            except Exception as error:
                if not self.is_off:
                    with guard(self.fail):
                        site = site_here(self.recorder, caller())
                        self._write("fetch of a batch", error, self.recorder.step, site)
                raise

        return next_batch

    def _write(self, what: str, error: BaseException | None, step: int, site: CallSite) -> None:
        self._num_told += 1
        if self._num_told > _MOST_TOLD:
            return
        self.recorder.event(
            BrokenPass,
            what=what,
            type="" if error is None else plain(type(error).__qualname__),
            message="" if error is None else shortened(message_of(error), _LONGEST_MESSAGE),
            frames=() if error is None else self._frames(error.__traceback__),
            step=step,
            site=site,
        )

    def _frames(self, trace: TracebackType | None) -> tuple[Frame, ...]:
        """Return where it was raised, innermost first."""
        script = self.recorder.main_script
        found = [
            Frame(code.co_filename, line, code.co_name, is_user_file(code.co_filename, script))
            for code, line in ((frame.f_code, line) for frame, line in traceback.walk_tb(trace))
            if not is_own_file(code.co_filename, script)
        ]
        return tuple(reversed(found))
