"""A connection to the job's store that only the strict mode uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from distdiag.probes.strict import Store


def own_store() -> Callable[[], Store]:
    """Return what opens the connection at its first use, and again after a new initialisation.

    A connection of its own: on a shared one, somebody else's long wait would block ours.
    """
    opened: list[tuple[Any, Any]] = []

    def open_store() -> Store:
        base: Any = distributed_c10d._get_default_store()
        if not opened or opened[0][0] is not base:
            opened[:] = [(base, PrefixStore("distdiag/strict", base.clone()))]
        store: Store = opened[0][1]
        return store

    return open_store
