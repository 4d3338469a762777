"""Processes that the script starts as ranks by itself, which no agent observes."""

import inspect
import sys
from typing import ClassVar, Final

import torch.distributed as dist

from distdiag.events.lifecycle import ProcessesSpawned
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import site_here

_MODULE: Final = "torch.multiprocessing.spawn"


class SpawnProbe(Probe):
    """Records calls of ``torch.multiprocessing.spawn`` and ``start_processes``.

    What a member of a process group starts are helpers, and no ranks.
    """

    name: ClassVar[str] = "spawned-processes"

    def _install(self) -> None:
        # As an attribute of its package it is hidden by the function of the same name.
        self._patches.wrap_everywhere(
            sys.modules[_MODULE], "start_processes", self._call_before(self._before)
        )

    def _before(self, *args: object, **kwargs: object) -> None:
        with self.guard:
            if dist.is_available() and dist.is_initialized():
                return
            try:
                given = inspect.signature(sys.modules[_MODULE].start_processes).bind(
                    *args, **kwargs
                )
                given.apply_defaults()
                number = int(given.arguments["nprocs"])
            except (TypeError, ValueError):
                return  # arguments that torch itself will refuse
            site = site_here(self.recorder, sys._getframe(2))
            self.recorder.event(ProcessesSpawned, number=number, site=site)
