"""Which process groups were used meanwhile, by how far their own counters have come."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class UsedGroups:
    """Remembers the counters of all process groups of this rank."""

    def __init__(self) -> None:
        """Look at the counters."""
        self._before = _counters()

    def members(self) -> tuple[int, ...]:
        """Return the ranks of the group that was used since, in its order; none if not one was.

        Of several groups it is the largest, if the others are parts of it.
        """
        after = _counters()
        used = [group for group, count in after.items() if count != self._before.get(group, 0)]
        ranks = [tuple(dist.get_process_group_ranks(group)) for group in used]
        if not ranks:
            return ()
        largest = max(ranks, key=len)
        return largest if all(set(each) <= set(largest) for each in ranks) else ()


def _counters() -> dict[Any, int]:
    counters: dict[Any, int] = {}
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        try:
            counters[group] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return counters
