"""Lets the monitors of several nodes find one another, by the store that the job has anyway.

Runs in a thread of its own beside the training: a store may take long to answer.
"""

import os
import sys
import threading
from datetime import timedelta
from typing import Final, Protocol

import msgspec

from distdiag.events.errors import UNDECODABLE
from distdiag.probes.untyped import Untyped
from distdiag.record.run_dir import Launch, ReporterAddress, RunDir, write_atomically


class Store(Protocol):
    """The part of torch's stores that is used here; none of it waits for another rank."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of the keys have been set."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that has been set."""

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""


PATIENCE: Final = timedelta(seconds=10)
LOOK_S: Final = 0.1
TRIES: Final = 3
_C10D: Final = "torch.distributed.distributed_c10d"


def is_needed(launch: Launch) -> bool:
    """Say whether this rank has to pass the address of the reporter on: one of each node does."""
    return launch.local_rank == 0 and launch.num_other_ranks > 0


class Rendezvous:
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
            RuntimeError: torch cannot reach the store, or finds something else in it, several times
                in a row.

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
        if self._store is not None or (_is_torch_ready() and _launcher_has_store()):
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
                write_atomically(path, msgspec.json.encode(_address(store.get(key))))
                return


def _address(value: bytes) -> ReporterAddress:
    try:
        return msgspec.json.decode(value, type=ReporterAddress)
    except UNDECODABLE as error:
        raise RuntimeError(f"the job's store holds no address of the reporter: {error}") from None


def _open_store() -> Store | None:
    """Return a connection of our own to the job's store, or None while there is no store.

    torchrun has one before the ranks begin; otherwise it comes with the default process group. The
    script's own connection is left alone, since a long wait on it would keep everybody waiting.
    torch is left for the script to import.
    """
    if not _is_torch_ready():
        return None
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import distributed_c10d

    base: Untyped  # torch's own types do not know that values may be bytes
    if _launcher_has_store():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        base = TCPStore(host, port, None, False, PATIENCE, wait_for_workers=False)
    elif distributed_c10d.is_initialized():
        default: Untyped = distributed_c10d._get_default_store()
        base = default.clone()
    else:
        return None
    store: Store = base
    return store


def _is_torch_ready() -> bool:
    spec = getattr(sys.modules.get(_C10D), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
