"""Processes that the script starts as ranks by itself, which no agent observes."""

from __future__ import annotations

import inspect
import sys
from typing import Any, ClassVar

import torch.distributed as dist

from distdiag.events.lifecycle import ProcessesSpawned
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import site_here


class SpawnProbe(Probe):
    """Records calls of ``torch.multiprocessing.spawn`` and ``start_processes``.

    What a member of a process group starts are helpers, and no ranks.
    """

    name: ClassVar[str] = "spawned-processes"

    def _install(self) -> None:
        # As an attribute of its package it is hidden by the function of the same name.
        module = sys.modules["torch.multiprocessing.spawn"]
        self._patches.wrap_everywhere(module, "start_processes", self._wrapper)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        signature = inspect.signature(original)

        @wrap_like(original)
        def start_processes(*args: object, **kwargs: object) -> object:
            if not self.is_off:
                self._before(signature, args, kwargs)
            return original(*args, **kwargs)

        return start_processes

    def _before(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with self.guard:
            if dist.is_available() and dist.is_initialized():
                return
            try:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                number = int(given.arguments["nprocs"])
            except (TypeError, ValueError):
                return  # arguments that torch itself will refuse
            site = site_here(self.recorder, sys._getframe(2))
            self.recorder.event(ProcessesSpawned, number=number, site=site)
