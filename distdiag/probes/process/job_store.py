"""A connection to the store by which the ranks of a job find one another."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final, Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

PATIENCE: Final = timedelta(seconds=10)


class Store(Protocol):
    """The part of torch's stores that is used here; none of it waits for another rank."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of the keys have been set."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that has been set."""

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""


def open_job_store() -> Store | None:
    """Return a connection of our own to the job's store, or None while there is no store.

    torchrun has one before the ranks begin; otherwise it comes with the default process group. The
    script's own connection is left alone, since a long wait on it would keep everybody waiting.
    """
    base: Any  # torch's own types do not know that values may be bytes
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        base = TCPStore(host, port, None, False, PATIENCE, wait_for_workers=False)
    elif distributed_c10d.is_initialized():
        default: Any = distributed_c10d._get_default_store()
        base = default.clone()
    else:
        return None
    store: Store = base
    return store
