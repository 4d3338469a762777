"""Lets the monitors of several nodes find one another, by the store that the job has anyway.

Runs in a thread of its own beside the training: a store may take long to answer.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from distdiag.record.run_dir import Launch, ReporterAddress, RunDir, write_atomically

if TYPE_CHECKING:
    from distdiag.probes.process.job_store import Store

LOOK_S: Final = 0.1
TRIES: Final = 3
_C10D: Final = "torch.distributed.distributed_c10d"


def is_needed(launch: Launch) -> bool:
    """Say whether this rank has to pass the address of the reporter on: one of each node does."""
    return launch.local_rank == 0 and launch.num_other_ranks > 0


class MeetingPoint:
    """The way of the address: from the reporter's file to the store, from there to our file."""

    def __init__(self, run_dir: RunDir, launch: Launch, stopping: threading.Event) -> None:
        """Prepare for one rank; `stopping` ends its waiting."""
        self._run_dir = run_dir
        self._launch = launch
        self._stopping = stopping
        self._store: Store | None = None
        self._done = threading.Event()

    def pass_address_on(self) -> None:
        """Wait, in small steps, until the address is where it must be, or it is time to stop.

        Raises:
            RuntimeError: torch cannot reach the store, several times in a row.

        """
        try:
            for tries_left in reversed(range(TRIES)):
                try:
                    self._pass_on()
                except RuntimeError:
                    self._store = None
                    if tries_left == 0:
                        raise
                else:
                    return
        finally:
            # Its connection goes with it: the script may close what it does not know.
            self._store = None
            self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for it, but only if there is a store by which it can come."""
        if self._store is not None:
            self._done.wait(timeout_s)

    def _pass_on(self) -> None:
        key = f"distdiag/reporter/{self._launch.attempt}"
        path = self._run_dir.reporter
        while not self._stopping.wait(LOOK_S):
            self._store = store = self._store or _open_store()
            if store is None:
                continue
            if self._launch.rank == 0:
                if path.exists():
                    store.set(key, path.read_bytes())
                    return
            elif store.check([key]):
                address = msgspec.json.decode(store.get(key), type=ReporterAddress)
                write_atomically(path, msgspec.json.encode(address))
                return


def _open_store() -> Store | None:
    """Open the job's store; torch is left for the script to import."""
    spec = getattr(sys.modules.get(_C10D), "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return None
    from distdiag.probes.process.job_store import open_job_store

    return open_job_store()
